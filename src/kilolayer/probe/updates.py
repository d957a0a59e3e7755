"""How far one step moves a model's output: by SGD and by Adam, of the matrices of the sublayers and of all weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from kilolayer.models.model import Model
from kilolayer.probe.places import top_states
from kilolayer.probe.propagation import Loss, relative_update

START_LR = 1e-5


@dataclass(frozen=True)
class UpdateSizes:
    """||F(x, one step later) - F(x)|| / ||F(x)||, at the learning rate `sgd_lr` or `adam_lr`.

    DeepNet's Theorems 2 and 3 are of SGD on the matrices: there its update does not grow with depth. adam_start: of all weights
    at `start_lr`, which is so small that the output still moves in proportion.
    """

    sgd_lr: float
    adam_lr: float
    start_lr: float
    sgd_matrices: float
    sgd_all: float
    adam_matrices: float
    adam_all: float
    adam_start: float


def update_sizes(
    model: Model, loss: Loss, *, lr: float, sgd_lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8
) -> UpdateSizes:
    """Of the output of the last stack, at real positions. lr: Adam's, whose first step this is; the model is left as it is."""
    output = top_states(loss)
    sgd = partial(torch.optim.SGD, lr=sgd_lr)
    adam = partial(torch.optim.Adam, lr=lr, betas=betas, eps=eps)
    start = partial(torch.optim.Adam, lr=START_LR, betas=betas, eps=eps)
    return UpdateSizes(
        sgd_lr,
        lr,
        START_LR,
        relative_update(model, loss, output, sgd, "matrices"),
        relative_update(model, loss, output, sgd, "all"),
        relative_update(model, loss, output, adam, "matrices"),
        relative_update(model, loss, output, adam, "all"),
        relative_update(model, loss, output, start, "all"),
    )
