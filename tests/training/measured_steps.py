"""What one of several processes holds and sends in a step, counted and planned."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import kilolayer as kl
from kilolayer.models import shards
from kilolayer.models.model import Model
from kilolayer.optimizers.optimizer import make_optimizer
from kilolayer.parallel.processes import Processes
from kilolayer.runs.budget import Precision, Work, budget
from kilolayer.runs.division import Division
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.guard import Guard
from kilolayer.training.placement import Placement
from kilolayer.training.step import Stepper
from kilolayer.training.trainer import DTYPES
from tests.fixtures.live_tensors import LiveTensors

CPU = torch.device("cpu")
BETWEEN = 32 << 10
"""Bytes between weights in a buffer, and of numbers."""


def check_a_step(
    group: dist.ProcessGroup, machines: int, precision: Precision, train: dict[str, Any], model: dict[str, Any]
) -> None:
    """Take a step on the tokens of one batch, and compare what is alive and what is sent with the plan."""
    processes, config, settings = Processes(group), kl.ModelConfig(**model), TrainConfig(**train)
    division = Division(processes.size, settings.shard, settings.shard_unit, machines, settings.reshard_after_forward)
    dtype, batches = DTYPES.get(precision), settings.accumulate
    tokens = torch.randint(4, 40, (1, 4))  # weights are much more than activations
    parts = (tokens,) * (3 if config.shape == "encoder_decoder" else 2)
    kinds = {"shard": settings.shard, "unit": settings.shard_unit, "reshards": settings.reshard_after_forward, "dtype": dtype}
    here = {"LOCAL_WORLD_SIZE": str(processes.size // machines)}
    with patch.dict(os.environ, here), LiveTensors() as live:
        built = Placement(config, processes, CPU, 1, **kinds).model.train()
        assert isinstance(built, Model)
        precise = None if dtype is None else built.cast_weights(dtype)
        optimizer = make_optimizer(built, settings, precise, sums=True)
        del precise
        stepper = Stepper(built, optimizer, settings, Guard(scaled=False), CPU, print, processes=processes)
        stepper.step([Tokens(parts)] * batches, 1e-3)
        between, live.peak = live.bytes, 0
        with Counted() as counted:
            for _ in range(batches):
                stepper.accumulate(*parts)
            stepper.sum_over_processes()
        passes, after = live.peak, live.bytes
        stepper.update()
    with shards.gathered_outside_layers(built), torch.no_grad():
        built(*parts[:-1])
        # Also while matrices are gathered, as in a validation.
        assert (shards.group_in_step(built) is None) == (settings.shard == "none" and config.moe is None)
    cost = budget(config, Work(*tokens.shape, precision=precision, accumulate=batches), division=division)
    planned = cost.training
    held = planned.weights + planned.optimizer + planned.sums
    pairs = {
        "held between steps": (held, between),
        "held before the update": (held, after),
        "gathered": (cost.sent.gathers, counted.gathers),
        "scattered": (cost.sent.scatters, counted.scatters),
        "summed": (cost.sent.copies + cost.sent.sums, counted.sums),
    }
    if config.moe is None:  # else what each process is sent decides
        pairs["peak"] = planned.peak - planned.workspaces, passes  # these are of a GPU
    expected = {
        name: pytest.approx(each, rel=0.05 if name == "peak" else 0.01, abs=BETWEEN) for name, (_, each) in pairs.items()
    }
    apart = {name: pair for name, pair in pairs.items() if pair[0] != expected[name]}
    assert not apart, f"planned and counted: {apart}; {planned}"


@dataclass(frozen=True)
class Tokens:
    """A batch of token ids."""

    parts: tuple[Tensor, ...]

    @property
    def tokens(self) -> int:
        return self.parts[-1].numel()


class Counted:
    """Counts the bytes that this process sends in its context: of a whole tensor, all processes but one hold another part."""

    gathers = scatters = sums = 0.0

    def __enter__(self) -> Counted:
        gather, scatter, add = shards.ALL_GATHER, shards.REDUCE_SCATTER, dist.all_reduce

        def counted_gather(output: Any, own: Any, *, group: Any, **options: Any) -> Any:
            self.gathers += output.nbytes * others(group)
            return gather(output, own, group=group, **options)

        def counted_scatter(output: Any, whole: Any, *, group: Any, **options: Any) -> Any:
            self.scatters += whole.nbytes * others(group)
            return scatter(output, whole, group=group, **options)

        def counted_sum(tensor: Any, *values: Any, group: Any, **options: Any) -> Any:
            self.sums += 2 * tensor.nbytes * others(group)
            return add(tensor, *values, group=group, **options)

        self.patches = [
            patch.object(shards, "ALL_GATHER", counted_gather),
            patch.object(shards, "REDUCE_SCATTER", counted_scatter),
            patch.object(dist, "all_reduce", counted_sum),
        ]
        for each in self.patches:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.patches:
            each.stop()


def others(group: dist.ProcessGroup) -> float:
    """The share of the other processes in a tensor."""
    return 1 - 1 / dist.get_world_size(group)
