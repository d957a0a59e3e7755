"""A training loop of one's own: on one process, on several that hold copies (DDP), or on several that hold shards (FSDP2).

    python examples/own_loop.py --out folder
    torchrun --standalone --nproc-per-node 2 examples/own_loop.py --parallel ddp --out folder
    torchrun --standalone --nproc-per-node 2 examples/own_loop.py --parallel fsdp --out folder

The text is made up: each token is the one before, plus one or two.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

import kilolayer as kl

PADDING = 0


def make_text(rows: int, length: int, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Int64 [rows, length], from 1 on: 0 is padding."""
    steps = torch.randint(1, 3, (rows, length), generator=generator)
    return steps.cumsum(dim=1) % (vocab_size - 1) + 1


def count_labels(batches: Sequence[Tensor]) -> Tensor:
    """The labels of this process's batches: int64 []."""
    return torch.stack([(text[:, 1:] != PADDING).sum() for text in batches]).sum()


def batch_loss(model: nn.Module, text: Tensor, labels_of_step: Tensor) -> Tensor:
    """What a batch, int64 [rows, length], adds to the mean loss over all labels of a step.

    The router loss is a mean over the batch, and counts as the batch does: by its labels. It is 0 in a dense model.
    """
    out, labels = model(text[:, :-1]), text[:, 1:]
    summed = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), ignore_index=PADDING, reduction="sum")
    return (summed + out.router_loss * (labels != PADDING).sum()) / labels_of_step


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Tensor]) -> tuple[float, float]:
    """One update from several batches of this process; return the loss of all processes and the norm of the gradient.

    model: as it is called, wrapped or not.
    """
    processes = dist.get_world_size() if dist.is_initialized() else 1
    labels = count_labels(batches)
    if processes > 1:
        dist.all_reduce(labels)
    total = torch.zeros((), dtype=torch.float64, device=labels.device)
    for index, text in enumerate(batches):
        last = index == len(batches) - 1
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        with no_sync(model) if not last else nullcontext():
            loss = batch_loss(model, text, labels)
            (loss * processes).backward()  # DDP and FSDP2 take the mean over the processes, where the sum is wanted
        total += loss.detach()
    if processes > 1:
        dist.all_reduce(total)
    norm = kl.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(total), float(norm.total)


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Where DDP leaves the gradients of this process alone."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def save(model: nn.Module, folder: str) -> None:
    """Write the whole model into a folder; call it on all processes, with the model and not what DDP made of it."""
    if isinstance(model, FSDPModule) or not dist.is_initialized() or dist.get_rank() == 0:
        kl.save(model, folder)  # shards are gathered from all processes


def main() -> None:
    """Run on each process."""
    parser = argparse.ArgumentParser(description="A custom training loop.")
    parser.add_argument("--parallel", choices=["none", "ddp", "fsdp"], default="none")
    parser.add_argument("--unit", type=int, default=1, help="layers that FSDP2 gathers together")
    parser.add_argument("--recipe", default="deepnorm")
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--bf16", action="store_true", help="compute products in bf16")
    parser.add_argument("--out", help="folder for the trained model")
    options = parser.parse_args()

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if options.parallel != "none":
        dist.init_process_group("nccl" if gpu else "gloo")
    rank, size = (dist.get_rank(), dist.get_world_size()) if options.parallel != "none" else (0, 1)

    torch.manual_seed(0)  # the same model on each process
    moe = kl.MoE(experts=options.experts) if options.experts else None
    model = kl.Decoder(32, 64, 4, 128, 6, recipe=options.recipe, moe=moe, dropout=0.1, device=device).train()
    generator = torch.Generator().manual_seed(1 + rank)
    if model.config.recipe.calibration() is not None:
        kl.calibrate(model, make_text(64, 128, 32, torch.Generator().manual_seed(0)).to(device))
    torch.manual_seed(1 + rank)  # other dropout on each

    if options.parallel == "fsdp":
        called = kl.fully_shard(model, unit=options.unit)
    elif options.parallel == "ddp":
        called = DistributedDataParallel(kl.fast(model), device_ids=[device.index] if gpu else None)
    else:
        called = kl.fast(model)
    groups = kl.parameter_groups(model, lr=2e-3, weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

    for step in range(1, options.steps + 1):
        batches = [make_text(16 // size, 33, 32, generator).to(device) for _ in range(options.accumulate)]
        with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
            loss, norm = train_step(called, optimizer, batches)
        schedule.step()
        if rank == 0 and (step % 10 == 0 or step == options.steps):
            print(f"step {step}: loss {loss:.3f}, gradient norm {norm:.3f}", flush=True)

    if options.out:
        save(model, options.out)
    if options.parallel != "none":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
