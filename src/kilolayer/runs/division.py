"""How several processes divide a model: what each of them holds of its weights, and what it sends in a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from kilolayer import hints
from kilolayer.errors import OptionError, UnusedOptionError
from kilolayer.layers.stack import Stack
from kilolayer.models.config import ModelConfig
from kilolayer.models.shards import matrices_of, weights_in_products
from kilolayer.models.trainable_config import TrainableConfig
from kilolayer.moe.experts import ExpertProjection
from kilolayer.moe.layer import expert_parameters
from kilolayer.optimizers.base import UpdateRule
from kilolayer.parallel.processes import Processes
from kilolayer.tasks.train_config import Shard
from kilolayer.terminal import counted

PRECISE = 4
"""Bytes of a number in fp32: of shards, masters, gradient sums, and of what is never rounded."""


@dataclass(frozen=True)
class Division:
    """What several processes share: `train.shard` and `train.shard_unit`, the number of all processes, and of machines.

    Experts are divided among all processes, whatever the shard. machines: each has its own copy of the shards; 1 unless
    `shard` is hybrid. reshards: `train.reshard_after_forward`.
    """

    processes: int = 1
    shard: Shard = "none"
    unit: int = 1
    machines: int = 1
    reshards: bool = True

    @property
    def shards(self) -> int:
        """The number of processes that share each matrix."""
        return 1 if self.shard == "none" else self.processes // self.machines

    def check(self, config: ModelConfig | TrainableConfig) -> None:
        """Raise if these processes cannot divide the model so."""
        if self.shard == "hybrid":
            self._check_machines()
        elif self.machines != 1:
            raise UnusedOptionError(
                f"the number of machines makes no difference to train.shard = {self.shard!r}",
                where=hints.argument("machines"),
                fix='remove it, or set train.shard to "hybrid"',
            )
        if self.shard != "none":
            self._check_shards(config)
        moe = None if isinstance(config, TrainableConfig) else config.moe
        if moe is not None and moe.experts % self.processes:
            others = (
                "; several processes would hold some in shards, which a plan does not count" if self.shard == "full" else ""
            )
            raise OptionError(
                f"{counted(moe.experts, 'expert')} cannot be shared evenly by {counted(self.processes, 'process')}{others}",
                where=hints.argument("processes"),
                fix="give a number that divides them",
            )

    def _check_machines(self) -> None:
        here, left = divmod(self.processes, self.machines)
        several = hints.argument("processes", 16)
        if self.machines == 1 or left or here < 2:
            raise OptionError(
                f"hybrid shards need several machines with equally many processes, at least 2, on each; "
                f"these are {counted(self.processes, 'process')} on {counted(self.machines, 'machine')}",
                where="train.shard",
                fix=f'say how many there are, such as {several} {hints.argument("machines", 2)}, or set it to "full"',
            )

    def _check_shards(self, config: ModelConfig | TrainableConfig) -> None:
        if self.processes == 1:
            raise OptionError(
                "there is one process, which has nobody to share the model with",
                where="train.shard",
                fix=f'say how many processes there are: {hints.argument("processes", 8)}; or set it to "none"',
            )
        check_shardable(config, self.unit)


def check_processes(config: ModelConfig | TrainableConfig, processes: Processes, unit: int) -> None:
    """Raise if these processes cannot share the matrices of the model."""
    # torchrun may have started several before, and go on with one after the others have died.
    if processes.group is None and not dist.is_torchelastic_launched():
        raise OptionError(
            "there is one process, which has nobody to share the model with",
            where="train.shard",
            fix='let torchrun start several, or set it to "none"',
        )
    check_shardable(config, unit)


def check_shardable(config: ModelConfig | TrainableConfig, unit: int) -> None:
    """Raise if the model cannot be sharded in units of this many layers."""
    if isinstance(config, TrainableConfig):
        raise OptionError(
            "the task has a model of its own, whose layers are not known", where="train.shard", fix='set it to "none"'
        )
    deepest = max(config.depths.encoder, config.depths.decoder)
    if unit > deepest:
        raise OptionError(
            f"a unit of {counted(unit, 'layer')} is larger than the deepest stack, which has {deepest}",
            where="train.shard_unit",
            fix=f"allowed: 1 to {deepest}",
        )


class Matrix(NamedTuple):
    """The size of a weight: the process with the most rows holds `rows / shards` of it, rounded up."""

    rows: int
    columns: int


@dataclass(frozen=True)
class Held:
    """Bytes that the process with the largest part of a model holds, without activations.

    sums: gradients that are collected over batches or processes. gathered: whole matrices in the dtype of the products: those
    outside of layers, and those of the unit of layers that is computed and of the next one, or of all layers. scattered: in the
    backward pass, whole gradients on their way to their shards. at_end: what is gathered and scattered at its end, besides the
    gradients of all shards.
    """

    weights: int
    gradients: int
    optimizer: int
    sums: int
    gathered: int
    scattered: int
    at_end: int


@dataclass(frozen=True)
class Sent:
    """Bytes that a process sends in a step.

    gathers: shards of matrices, to be computed. scatters: gradients of matrices, to their shards. copies: gradients of shards,
    between machines that hold the same ones. sums: gradients of weights that are whole on each process.
    """

    gathers: int
    scatters: int
    copies: int
    sums: int

    @property
    def total(self) -> int:
        return self.gathers + self.scatters + self.copies + self.sums

    def seconds(self, bandwidth: float, inside: float) -> float:
        """The time that sending takes. bandwidth, inside: bytes per second, inside: of the links within a machine."""
        return (self.copies + self.sums) / bandwidth + (self.gathers + self.scatters) / inside


@dataclass(frozen=True)
class Weights:
    """The weights of a model in elements, by what processes do with them.

    layers: the matrices of each layer of each stack. tables: matrices outside of layers. whole: norms, scales and routers.
    biases: of matrix products, in their dtype, and whole too.
    experts, expert_norms: matrices and norms of all experts. state, expert_state: bytes of the optimizer's state, without
    masters, of all weights but the experts and of the experts.
    """

    layers: tuple[tuple[tuple[Matrix, ...], ...], ...]
    tables: tuple[Matrix, ...]
    whole: int
    biases: int
    experts: int
    expert_norms: int
    state: int
    expert_state: int

    @property
    def matrices(self) -> int:
        """The number of elements of all matrices and tables."""
        return _total(self._all(), 1)

    def held(self, division: Division, size: int, *, collects: bool) -> Held:
        """What a process holds. size: bytes of a number in products. collects: whether a step has several batches."""
        masters = 0 if size == PRECISE else PRECISE
        processes, shards = division.processes, division.shards
        cast, whole, rows, part = self.experts // processes + self.biases, self.whole + self.expert_norms // processes, 0, 1.0
        if shards == 1:
            cast += self.matrices
        else:
            rows = _total(self._all(), shards) // shards
            everywhere = self.whole + self.biases
            part = (rows + everywhere) / (self.matrices + everywhere)
        weights = size * cast + PRECISE * (whole + rows)
        summed = cast + whole + rows if collects or processes > 1 else 0
        gathered, scattered, at_end = self._in_pass(division, size)
        return Held(
            weights=weights,
            gradients=weights,
            optimizer=masters * cast + round(self.state * part) + self.expert_state // processes,
            sums=PRECISE * summed,
            gathered=gathered,
            scattered=scattered,
            at_end=at_end,
        )

    def sent(self, division: Division, size: int, batches: int) -> Sent:
        """What a process sends in a step of this many batches. What is routed to experts is not counted.

        Each batch gathers what is in layers for each pass, or once for both, and the rest once, and it scatters all gradients.
        """
        processes, shards, machines = division.processes, division.shards, division.machines
        if shards == 1:
            return Sent(0, 0, 0, _summed(PRECISE * (self.matrices + self.whole + self.biases), processes))
        outside, inside = _total(self.tables, shards), _total(self._of_layers(), shards)
        others, times = (shards - 1) / shards, 2 if division.reshards else 1
        return Sent(
            gathers=round(batches * others * size * (outside + times * inside)),
            scatters=round(batches * others * PRECISE * (outside + inside)),
            copies=batches * _summed(PRECISE * (outside + inside) // shards, machines),
            sums=_summed(PRECISE * (self.whole + self.biases), processes),
        )

    def _all(self) -> Iterable[Matrix]:
        return (*self.tables, *self._of_layers())

    def _of_layers(self) -> Iterable[Matrix]:
        return (matrix for layers in self.layers for layer in layers for matrix in layer)

    def _in_pass(self, division: Division, size: int) -> tuple[int, int, int]:
        """The bytes `gathered`, `scattered` and `at_end` of `Held`.

        A unit's gradients are copied to an fp32 buffer, which is kept until the next unit's are. At the end the tables follow;
        they are gathered until then, and so are the first units, whose shards have no gradient yet.
        """
        shards = division.shards
        if shards == 1:
            return 0, 0, 0
        units = [
            sum(_total(layer, shards) for layer in layers[first : first + division.unit])
            for layers in self.layers
            for first in range(0, len(layers), division.unit)
        ]
        unit, tables = max(units), _total(self.tables, shards)
        first = min(2, len(units)) * unit
        gathered = size * (tables + (first if division.reshards else sum(units)))
        scattered = size * (tables + unit) + PRECISE * unit
        before = size * (tables + first) + scattered - PRECISE * (tables + first) // shards
        return gathered, scattered, max(before, (size + PRECISE) * tables + PRECISE * unit)


def weights_of(model: nn.Module, rule: UpdateRule) -> Weights:
    """The weights of a model on the meta device, which has no experts afterwards."""
    matrices = dict.fromkeys(matrices_of(model))
    left = dict(matrices)
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    layers = tuple(tuple(_take(left, block) for block in stack.blocks) for stack in stacks)
    experts = [weight for _, weight in expert_parameters(model)]
    of_products = {
        weight for module in model.modules() if isinstance(module, ExpertProjection) for weight in module.parameters()
    }
    of_experts = sum(weight.numel() for weight in of_products)
    norms = sum(weight.numel() for weight in experts) - of_experts
    biases = [weight for weight in weights_in_products(model) if weight not in matrices]
    others = {*matrices, *biases, *experts}
    whole = sum(weight.numel() for weight in model.parameters() if weight not in others)
    all_state = rule.state_bytes(model)
    for weight in experts:
        weight.data = weight.data[:0]
    state = rule.state_bytes(model)
    of_biases = sum(weight.numel() for weight in biases)
    return Weights(layers, tuple(map(_size, left)), whole, of_biases, of_experts, norms, state, all_state - state)


def _take(left: dict[nn.Parameter, None], block: nn.Module) -> tuple[Matrix, ...]:
    """The sizes of the matrices of a layer, which are removed from those that are left."""
    own = [weight for weight in block.parameters() if weight in left]
    for weight in own:
        del left[weight]
    return tuple(map(_size, own))


def _size(weight: nn.Parameter) -> Matrix:
    return Matrix(len(weight), weight.numel() // max(len(weight), 1))


def _total(matrices: Iterable[Matrix], shards: int) -> int:
    """The elements of all matrices, whose rows are filled up to a multiple of the number of shards."""
    return sum(-(-rows // shards) * shards * columns for rows, columns in matrices)


def _summed(size: int, processes: int) -> int:
    """Bytes that each process sends in a sum over processes: all but its part, twice."""
    return round(2 * (processes - 1) / processes * size)
