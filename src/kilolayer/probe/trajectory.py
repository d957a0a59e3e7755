"""The path of training in the plane of its largest movement: the first two principal components of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from kilolayer.errors import InputError
from kilolayer.files.tensors import Expected
from kilolayer.models.model import Model
from kilolayer.probe.propagation import Loss
from kilolayer.probe.surface import Surface, loss_surface
from kilolayer.runs import checkpoint

FEWEST = 3
"""Minimum number of points for a plane."""
AT_ONCE = 1 << 20
"""Number of weights per point that are converted to fp64 at a time."""


class Trajectory(Protocol):
    """The weights of a model at several steps of its training, read parameter by parameter."""

    @property
    def steps(self) -> Sequence[int]:
        """The steps of the points, in increasing order."""
        ...

    def read(self, name: str) -> list[Tensor]:
        """The values of one parameter at each step."""
        ...


@dataclass
class Recorded:
    """Weights recorded by a custom training loop; held in CPU memory."""

    steps: list[int] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)

    def note(self, step: int, model: nn.Module) -> None:
        """Keep a copy of the model's parameters."""
        # Not .cpu(), which makes no copy of a parameter that is already on the CPU.
        copies = {name: torch.empty_like(p, device="cpu").copy_(p.detach()) for name, p in model.named_parameters()}
        self.steps.append(step)
        self.weights.append(copies)

    def read(self, name: str) -> list[Tensor]:
        return [weights[name] for weights in self.weights]


class Saved:
    """The checkpoints of a run; tensors are read on demand, so that only one parameter at a time is in memory.

    start: the weights before the first step, if known.
    """

    def __init__(self, paths: Sequence[Path], start: Mapping[str, Tensor] | None = None) -> None:
        self.paths, self.start = paths, start
        self.saved = [checkpoint.open_tensors(path, checkpoint.MODEL) for path in paths]

    @classmethod
    def of(cls, folder: Path, start: Mapping[str, Tensor] | None = None, expected: Expected | None = None) -> Saved:
        """All complete checkpoints in a run's checkpoint folder. expected: what the files of weights can hold."""
        return cls([path for path in checkpoint.steps(folder) if checkpoint.find_fault(path, expected) is None], start)

    @property
    def steps(self) -> list[int]:
        return [*([] if self.start is None else [0]), *map(checkpoint.step_of, self.paths)]

    def read(self, name: str) -> list[Tensor]:
        for path, tensors in zip(self.paths, self.saved, strict=True):
            if name not in tensors:
                raise InputError(
                    f"the checkpoint belongs to another model: it has no {name}", where=str(path), fix="use the run's own"
                )
        saved = [tensors[name] for tensors in self.saved]
        return saved if self.start is None else [self.start[name], *saved]


@dataclass(frozen=True)
class Plane:
    """A plane in weight space and a path in it.

    directions: two orthogonal directions of norm 1. path: [points, 2], the coordinates of the points; the last one is the
    origin. explained: the share of the variance of all points along each direction.
    """

    steps: tuple[int, ...]
    directions: tuple[dict[str, Tensor], dict[str, Tensor]]
    path: np.ndarray
    explained: tuple[float, float]


def principal_plane(trajectory: Trajectory, names: Sequence[str]) -> Plane:
    """The plane of the first two principal components of the weights `names` over the points.

    They are computed from the inner products of the points, [points, points], so that no matrix is larger than the weights:
    with X the points minus their mean, X X^T u = s^2 u, and X^T u / s is a component. Signs are chosen so that the path begins
    to the lower left of its end.
    """
    count = len(trajectory.steps)
    if count < FEWEST:
        raise InputError(f"a plane needs at least {FEWEST} points of the path, and there are {count}")
    gram = torch.zeros(count, count, dtype=torch.float64)
    for name in names:
        for part in _centred(trajectory.read(name)):
            gram += part @ part.T
    if not gram.isfinite().all():
        raise InputError("the weights are not finite at every point of the path")
    values, vectors = torch.linalg.eigh(gram)
    total = float(values.sum())
    # A singular value below the rounding error of the sums is not a direction.
    if values[-2] <= 1e-12 * total:
        raise InputError("the path does not span a plane: its points are on one line")
    sizes, vectors = values[[-1, -2]].sqrt(), vectors[:, [-1, -2]]
    path = (vectors - vectors[-1]) * sizes
    signs = torch.where(path[0] > 0, -1.0, 1.0)
    shares = vectors * signs / sizes
    directions = {name: _combined(trajectory.read(name), shares) for name in names}
    first, second = ({name: pair[index] for name, pair in directions.items()} for index in (0, 1))
    explained = (float(sizes[0] ** 2 / total), float(sizes[1] ** 2 / total))
    return Plane(tuple(trajectory.steps), (first, second), (path * signs).numpy(), explained)


def _centred(points: list[Tensor]) -> Iterator[Tensor]:
    """The points minus their mean, as rows in fp64, one chunk of columns at a time."""
    flat = [point.detach().flatten() for point in points]
    stretches = range(0, max(1, flat[0].numel()), AT_ONCE)
    return (_subtract_mean(torch.stack([each[start : start + AT_ONCE].double() for each in flat])) for start in stretches)


def _subtract_mean(rows: Tensor) -> Tensor:
    return rows - rows.mean(dim=0)


def _combined(points: list[Tensor], shares: Tensor) -> tuple[Tensor, Tensor]:
    """sum_i shares[i, k] (points[i] - their mean), in the points' dtype; shares [points, 2]."""
    joined = torch.cat([shares.T @ part for part in _centred(points)], dim=1)
    first, second = joined.to(points[0].dtype).unflatten(1, points[0].shape or (1,))
    return first.view(points[0].shape), second.view(points[0].shape)


def around(path: np.ndarray, size: int, margin: float = 0.25) -> tuple[np.ndarray, np.ndarray]:
    """The x and y of a grid around a path [points, 2], with `margin` times its extent on each side; size: points per axis."""
    low, high = path.min(axis=0), path.max(axis=0)
    room = margin * (high - low)
    across, upwards = (np.linspace(low[axis] - room[axis], high[axis] + room[axis], size) for axis in (0, 1))
    return across, upwards


def trajectory_surface(
    model: Model, loss: Loss, plane: Plane, size: int, after_row: Callable[[int], None] | None = None
) -> Surface:
    """Compute the loss in the plane around the path; model: with the weights of the path's last point."""
    across, upwards = around(plane.path, size)
    return loss_surface(model, loss, plane.directions, across, upwards, after_row)
