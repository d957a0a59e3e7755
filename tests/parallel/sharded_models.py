"""Models sharded by `kl.fully_shard` on each process, beside whole ones. Run on each process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import kilolayer as kl
from kilolayer.errors import InputError, OptionError
from kilolayer.speed.fast import compile_layers, fast_form

STEPS = 3


def native(recipe: str) -> kl.EncoderDecoder:
    torch.manual_seed(0)
    model = kl.EncoderDecoder(13, 16, 2, 24, 4, 3, recipe=recipe, tie_embeddings=True, dtype=torch.float64).train()
    for weight in model.parameters():
        if weight.dim() == 0 and weight == 0:  # a branch that starts switched off has no gradient below it
            nn.init.constant_(weight, 0.3)
    return model


def adapted(recipe: str) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True, norm_first=True, dtype=torch.float64)
    norm = nn.LayerNorm(16, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 4, norm=norm, enable_nested_tensor=False)
    kl.adapt(model, kl.recipes.get(recipe, base_width=16) if recipe == "complete_p" else recipe, seed=1)
    return model.train()


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """A mean over rows, int64 [rows, length]."""
    if isinstance(model, kl.EncoderDecoder):
        return model(rows, rows).logits.log_softmax(-1)[..., 1].mean()
    states = nn.functional.one_hot(rows, 16).double()
    return model(states).square().mean() + model(states).diff(dim=1).square().mean()


def train(model: nn.Module, batches: list[Tensor]) -> list[float]:
    groups = kl.parameter_groups(model, lr=1e-2, weight_decay=0.1, layer_decay=0.9, eps=1e-3)
    optimizer = torch.optim.AdamW(groups, eps=1e-3, foreach=True)  # the default on a GPU
    norms = []
    for batch in batches:
        for half in batch.chunk(2):
            (loss_of(model, half) / 2).backward()
        norms.append(float(kl.clip_grad_norm_(model, 0.1).total))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def check_sharded(group: dist.ProcessGroup, make: Any, recipe: str, unit: int, folder: str) -> None:
    """Norms of each step, and the weights that are saved. Each process reads its rows of each batch."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randint(1, 13, (8, 5), generator=generator) for _ in range(STEPS)]
    mesh = DeviceMesh.from_group(group, "cpu")
    model = kl.fully_shard(make(recipe), unit=unit, mesh=mesh)
    found = train(model, [batch[group.rank() :: group.size()] for batch in batches])
    with torch.no_grad():
        loss_of(model, batches[0])  # gathers weights that no backward pass releases
    kl.save(model, folder)
    alone = make(recipe)
    torch.testing.assert_close(found, train(alone, batches), rtol=1e-10, atol=1e-12)
    assert max(found) > 0.1  # so that some are clipped
    saved = kl.load_model(folder).state_dict()
    assert saved.keys() == alone.state_dict().keys()
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-9, atol=1e-11, msg=name)


def check_compiled(group: dist.ProcessGroup, recipe: str, unit: int) -> None:
    """Steps of a fast form with compiled layers."""
    warnings.simplefilter("ignore")  # the compiler's own, for its developers
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randint(1, 13, (8, 5), generator=generator) for _ in range(STEPS)]
    model = kl.fully_shard(native(recipe), unit=unit, mesh=DeviceMesh.from_group(group, "cpu"))
    form = fast_form(model)
    compile_layers(form, "aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = train(form, [batch[group.rank() :: group.size()] for batch in batches])
    # One for each kind of layer; in units of several layers, the first steps compile each once more.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (2 if unit == 1 else 4)
    torch.testing.assert_close(found, train(native(recipe), batches), rtol=1e-10, atol=1e-12)


def check_refusals(group: dist.ProcessGroup, folder: str) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    with pytest.raises(OptionError, match="unit is 5\nallowed: 1 to 4"):
        kl.fully_shard(native("deepnorm"), unit=5, mesh=mesh)
    with pytest.raises(OptionError, match="unit is True"):
        kl.fully_shard(native("deepnorm"), unit=True, mesh=mesh)
    with pytest.raises(OptionError, match="ignored_params is chosen"):
        kl.fully_shard(native("deepnorm"), mesh=mesh, ignored_params=set())
    with pytest.raises(InputError, match="no stack of layers"):
        kl.fully_shard(nn.Linear(2, 2), mesh=mesh)
    mixed = native("deepnorm")
    mixed.cast_weights(torch.bfloat16)
    with pytest.raises(InputError, match=r"of one dtype.*\n.*\n.*autocast"):
        kl.fully_shard(mixed, mesh=mesh)
    with pytest.raises(InputError, match=r"meta device\ncall model.materialize"):
        kl.fully_shard(kl.build_model(mixed.config, device="meta"), mesh=mesh)
    model = kl.fully_shard(native("deepnorm"), mesh=mesh)
    with pytest.raises(InputError, match="already sharded"):
        kl.fully_shard(model, mesh=mesh)
    admin = kl.fully_shard(native("admin"), mesh=mesh)
    with pytest.raises(InputError, match="calibrate the whole model first"):
        kl.calibrate(admin, torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(InputError, match="ProcessGroup is not a mesh"):
        kl.fully_shard(native("deepnorm"), mesh=group)
    if group.rank() == 0:
        (Path(folder) / "other.txt").write_text("something else")
    dist.barrier(group)
    with pytest.raises(InputError, match="the folder holds something else"):  # on all processes: none waits for the first
        kl.save(model, folder)
