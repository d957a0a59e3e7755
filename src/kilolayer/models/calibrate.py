"""Calibration: the profiling pass of recipes such as Admin, whose residual scales are computed from data.

One forward pass measures the variance of each branch f_i(x_i); the skip scale w_i of each residual w_i x_i + f_i(x_i) is set
from the variances before it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kilolayer.errors import InputError, shown
from kilolayer.layers.context import Sequences
from kilolayer.layers.modules import in_mode
from kilolayer.layers.stack import Stack
from kilolayer.layers.sublayer import Sublayer
from kilolayer.models.model import Model
from kilolayer.models.sharded import is_unit
from kilolayer.moe.shard import expert_group
from kilolayer.torch_state import own_torch_state

logger = logging.getLogger(__name__)

Batch = Tensor | Sequence[Tensor] | Mapping[str, Any]
TOKENS = 8_000
"""Size of the batch to calibrate on, in tokens (Very Deep Transformers, footnote 5)."""


@dataclass(frozen=True)
class Calibration:
    """The residual scales that were set: one per sublayer, in order, for each stack; empty if the recipe needs none."""

    encoder: tuple[float, ...] = ()
    decoder: tuple[float, ...] = ()


@torch.no_grad()
def calibrate(model: Model, batch: Batch) -> Calibration:
    """Set the residual scales of `model` from one forward pass over `batch`, with dropout on.

    batch: what the model's forward takes: a tensor, a sequence of tensors, or a mapping of keywords; about `TOKENS` tokens are
    enough. torch's random state is left unchanged. If the recipe needs no data, nothing happens, and a log line says so.
    """
    if not isinstance(model, Model):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"{type(model).__name__} is not a Kilolayer model", fix="give the model itself, not a wrapper")
    if not isinstance(batch, Tensor | Sequence | Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"the batch is {shown(batch)}", fix="give what the model's forward takes: ids, or (source, target)")
    rule = model.config.recipe.calibration()
    if rule is None:
        logger.warning("recipe %s needs no calibration: nothing was changed", model.config.recipe.name)
        return Calibration()
    shared = expert_group(model) is not None
    # The processes of a run, which are the model's sharers, all have the same batch.
    if shared or (is_unit(model) and model.sharers is None):
        raise InputError(
            "processes that share a model would find different scales, each from its own tokens",
            fix="calibrate the whole model first, with the same batch on each process, then call "
            f"{'shard_experts' if shared else 'fully_shard'}",
        )
    probes = {stack.side: _Profile(stack, running=rule == "running") for stack in model.stacks()}
    # The stacks of a model inside of this one, such as the decoder of an image encoder, if the batch reaches them.
    inner = [stack for part in model.children() if isinstance(part, Model) for stack in part.stacks()]
    nested = [_Profile(stack, running=rule == "running") for stack in inner]
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    try:
        with own_torch_state("kl.calibrate", devices), in_mode(model, training=True):
            _run(model, batch)
        for probe in nested:
            probe.finish() if probe.has_run else probe.restore()
        return Calibration(**{side: probe.finish() for side, probe in probes.items()})
    except BaseException:
        for probe in (*probes.values(), *nested):
            probe.restore()
        raise
    finally:
        for probe in (*probes.values(), *nested):
            probe.remove()


def joined(batches: Sequence[Sequence[Tensor] | Mapping[str, Tensor]]) -> tuple[Tensor, ...] | dict[str, Tensor]:
    """Join several batches into one, right-padded with 0, in the form that the model's forward takes."""
    first = batches[0]
    if isinstance(first, Mapping):
        return {name: _stacked([each[name] for each in batches if isinstance(each, Mapping)]) for name in first}
    return tuple(_stacked(list(parts)) for parts in zip(*batches, strict=True))


def _stacked(parts: list[Tensor]) -> Tensor:
    """Concatenate tensors [rows, length, ...] to [all rows, longest, ...]."""
    longest = max(part.shape[1] for part in parts)
    whole = parts[0].new_zeros(sum(map(len, parts)), longest, *parts[0].shape[2:])
    for rows, part in zip(whole.split([len(part) for part in parts]), parts, strict=True):
        rows[:, : part.shape[1]] = part
    return whole


class _Profile:
    """Hooks on the sublayers of one stack that compute the scale of each residual, in order."""

    def __init__(self, stack: Stack, running: bool) -> None:
        self.sublayers = stack.sublayers()
        self.running, self.side = running, stack.side
        self.real: Tensor | None = None
        self.branch = torch.tensor(0.0)
        self.scales = [1.0]
        self.total = 0.0
        self.before = [_scale_of(sublayer).clone() for sublayer in self.sublayers]
        self.handles = [stack.register_forward_pre_hook(self._record_padding)]
        for index, sublayer in enumerate(self.sublayers):
            _scale_of(sublayer).fill_(1.0)
            self.handles.append(sublayer.register_forward_pre_hook(self._before(index)))
            self.handles.append(sublayer.branch.register_forward_hook(self._record_branch))
            self.handles.append(sublayer.register_forward_hook(self._after))

    @property
    def has_run(self) -> bool:
        """Whether the pass has reached this stack."""
        return len(self.scales) > 1

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def restore(self) -> None:
        """Restore the scales from before the pass."""
        for sublayer, scale in zip(self.sublayers, self.before, strict=True):
            _scale_of(sublayer).copy_(scale)

    def finish(self) -> tuple[float, ...]:
        """Write the scales into the model. The scale that follows the last sublayer is not used."""
        scales = tuple(self.scales[: len(self.sublayers)])
        for sublayer, scale in zip(self.sublayers, scales, strict=True):
            _scale_of(sublayer).fill_(scale)
        return scales

    def _record_padding(self, stack: nn.Module, inputs: tuple[Sequences, ...]) -> None:
        self.real = inputs[0].real

    def _record_branch(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.branch = output

    def _before(self, index: int) -> Any:
        def apply(sublayer: Sublayer, inputs: tuple[Tensor, ...]) -> None:
            if self.running:
                _scale_of(sublayer).fill_(self.scales[index])

        return apply

    def _after(self, sublayer: Sublayer, inputs: tuple[Tensor, ...], output: object) -> None:
        if self.running:
            # w_{i+1}^2 = Var(w_i x_i) + Var(f_i(x_i)), as the released code computes it.
            variance = self._variance(sublayer.skip(inputs[0])) + self._variance(self.branch)
        else:
            # w_{i+1}^2 = sum over j <= i of Var f_j (Very Deep Transformers, section 3).
            self.total += self._variance(self.branch)
            variance = self.total
        self.scales.append(variance**0.5)

    def _variance(self, x_BLD: Tensor) -> float:
        values = x_BLD if self.real is None else x_BLD[self.real]
        variance = float(values.double().var(correction=0)) if values.numel() else math.nan
        if not math.isfinite(variance):
            raise InputError(
                f"the {self.side} has no finite variance to calibrate by",
                where=f"residual sublayer {len(self.scales)}",
                fix="give a batch with real tokens and a model whose forward is finite",
            )
        return variance


def _scale_of(sublayer: Sublayer) -> Tensor:
    weight = sublayer.skip.weight
    assert isinstance(weight, Tensor)
    return weight


def _run(model: Model, batch: Batch) -> None:
    if isinstance(batch, Tensor):
        model(batch)
    elif isinstance(batch, Mapping):
        model(**batch)
    else:
        model(*batch)
