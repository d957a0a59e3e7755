"""The loss around a model's weights: along random directions (Li et al. 2018), or along given ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from kilolayer.errors import InputError
from kilolayer.layers.modules import in_mode
from kilolayer.models.model import Model
from kilolayer.optimizers.weight_factors import NO_MATRICES
from kilolayer.probe.propagation import Loss

Direction = Mapping[str, Tensor]
"""A direction in weight space: by name, the tensors that a step of 1 adds to some of a model's parameters."""


@dataclass(frozen=True)
class Surface:
    """The mean loss at weights + x * first + y * second: loss [y, x]; it can be NaN or infinite."""

    x: np.ndarray
    y: np.ndarray
    loss: np.ndarray

    @property
    def centre(self) -> float:
        """The loss at the grid point nearest to the model's own weights."""
        return float(self.loss[np.abs(self.y).argmin(), np.abs(self.x).argmin()])


def random_direction(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """A random filter-normalized direction (Li et al. 2018, section 4): d_i ||w_i|| / ||d_i|| with d_i ~ N(0, I).

    A filter w_i is what produces one output: a row of a matrix, the vector of a token, or the kernels of a channel. Biases,
    gains and scales are not part of the direction. It is drawn on the CPU, so a seed gives the same direction on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, weight in filters(model).items():
        drawn = torch.randn(weight.shape, generator=generator).to(weight)
        axes = axes_of_filter(weight)
        lengths = vector_norm(drawn, dim=axes, keepdim=True).clamp_min(torch.finfo(drawn.dtype).tiny)
        found[name] = drawn * (vector_norm(weight.detach(), dim=axes, keepdim=True) / lengths)
    return found


def axes_of_filter(weight: Tensor) -> tuple[int, ...]:
    """The axes of a weight along which a filter lies: all but the first of a convolution's, else the last."""
    return (1, 2, 3) if weight.dim() == 4 else (-1,)


def filters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The matrices, embedding tables and convolutions of a model by name."""
    without = {parameter for part in model.modules() if isinstance(part, NO_MATRICES) for parameter in part.parameters(False)}
    named = model.named_parameters()
    return {name: p for name, p in named if p.dim() >= 2 and p not in without and not name.endswith("bias")}


def grid(size: int, span: float) -> np.ndarray:
    """`size` evenly spaced values from -span to span; they include 0 if `size` is odd."""
    half = (size - 1) / 2
    return span * (np.arange(size) - half) / half if size > 1 else np.zeros(1)


@torch.no_grad()
def loss_surface(
    model: Model,
    loss: Loss,
    directions: Sequence[Direction],
    x: Sequence[float] | np.ndarray,
    y: Sequence[float] | np.ndarray = (0.0,),
    after_row: Callable[[int], None] | None = None,
) -> Surface:
    """Compute the loss, without dropout, at weights + x * first + y * second for all x and y.

    With a single direction, the surface is a line with y = 0. A copy of the model is moved; the model itself is not changed.
    after_row: called with the number of finished rows.
    """
    across, upwards = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(directions) not in (1, 2) or (len(directions) == 1 and upwards.any()):
        raise InputError(f"{len(directions)} directions for a surface", fix="give one and x, or two with x and y")
    origins = dict(model.named_parameters())
    _check_directions(directions, origins)
    moved = copy.deepcopy(model)
    weights = {name: weight for name, weight in moved.named_parameters() if any(name in each for each in directions)}
    found = np.full((len(upwards), len(across)), math.nan)
    with in_mode(moved, training=False):
        for row, up in enumerate(upwards):
            for column, right in enumerate(across):
                for name, weight in weights.items():
                    weight.copy_(_moved(origins[name], [each.get(name) for each in directions], (right, up)))
                found[row, column] = float(loss(moved))
            if after_row is not None:
                after_row(row + 1)
    return Surface(across, upwards, found)


def _moved(origin: Tensor, directions: Sequence[Tensor | None], shares: Sequence[float]) -> Tensor:
    for direction, share in zip(directions, shares, strict=False):
        if direction is not None and share:
            origin = torch.add(origin, direction.to(origin), alpha=float(share))
    return origin


def _check_directions(directions: Sequence[Direction], weights: Mapping[str, Tensor]) -> None:
    for direction in directions:
        for name, each in direction.items():
            if name not in weights or weights[name].shape != each.shape:
                here = list(weights[name].shape) if name in weights else "no parameter"
                raise InputError(
                    f"the direction has {name} of shape {list(each.shape)}, and the model {here}",
                    fix="give a direction of this model's parameters, by name",
                )
