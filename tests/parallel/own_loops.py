"""The loop of examples/own_loop.py on each process, beside the same batches on one. Run on each process."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kilolayer as kl

sys.path.append(str(Path(__file__).parents[2] / "examples"))

STEPS, ACCUMULATE = 5, 2


def build(recipe: str, experts: int) -> kl.Decoder:
    torch.manual_seed(0)
    moe = kl.MoE(experts=experts) if experts else None
    model = kl.Decoder(13, 16, 2, 24, 2, recipe=recipe, moe=moe, dtype=torch.float64).train()
    for name, weight in model.named_parameters():
        if weight.dim() == 0 and weight == 0:  # a branch that starts switched off has no gradient below it
            nn.init.constant_(weight, 0.3 if "bias" not in name else 0.1)
    if model.config.recipe.calibration() is not None:
        kl.calibrate(model, torch.arange(1, 13).view(2, 6))
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(kl.parameter_groups(model, lr=1e-2, weight_decay=0.1), eps=1e-3)


def check_equal_to_one_process(group: dist.ProcessGroup, parallel: str, recipe: str, experts: int, folder: str) -> None:
    """Losses, norms and weights after a few steps, and what is saved. Processes have batches of different lengths."""
    import own_loop

    # A layer of B2T hands its input on as the second state, which torch takes for a view; nothing changes it in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    assert group.size() == dist.get_world_size()
    generator = torch.Generator().manual_seed(5)
    lengths = (5, 8, 6, 7)
    steps = [[own_loop.make_text(3, length, 13, generator) for length in lengths] for _ in range(STEPS)]
    steps[0][1][0, 4:] = own_loop.PADDING
    rank, size = dist.get_rank(), dist.get_world_size()

    model = build(recipe, experts)
    called = DistributedDataParallel(kl.fast(model)) if parallel == "ddp" else kl.fully_shard(model)
    optimizer = optimizer_of(model)
    found = [own_loop.train_step(called, optimizer, batches[rank::size]) for batches in steps]
    own_loop.save(model, folder)
    dist.barrier()

    alone, expected = build(recipe, experts), []
    optimizer = optimizer_of(alone)
    for batches in steps:
        labels = own_loop.count_labels(batches)
        losses = [own_loop.batch_loss(alone, text, labels) for text in batches]
        torch.stack(losses).sum().backward()
        norm = kl.clip_grad_norm_(alone, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append((float(sum(losses).detach()), float(norm.total)))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    saved = kl.load_model(folder).state_dict()
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-9, atol=1e-11, msg=name)
