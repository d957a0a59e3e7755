"""How far one step of SGD or Adam moves a model's output, if it updates the sublayers' matrices only, or all weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kilolayer.probe.hooks import top_states
from kilolayer.probe.propagation import Loss, relative_update


@dataclass(frozen=True)
class UpdateSizes:
    """||F(x, after one step) - F(x)|| / ||F(x)||, with the learning rate `sgd_lr` or `adam_lr`.

    DeepNet's Theorems 2 and 3 are about SGD on the matrices, whose update does not grow with depth.
    """

    sgd_lr: float
    adam_lr: float
    sgd_matrices: float
    sgd_all: float
    adam_matrices: float
    adam_all: float


def update_sizes(
    model: Any,
    loss: Loss,
    *,
    lr: float,
    sgd_lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-8,
    output: Callable[[Any], Tensor] | None = None,
    matrices: Literal["matrices"] | Callable[[Any], list[nn.Parameter]] = "matrices",
) -> UpdateSizes:
    """Measure the output of the last stack at real positions. lr: of Adam's first step. The model is not changed.

    output, matrices: compute F(x), and find the matrices of the sublayers, in a model that is not Kilolayer's.
    """
    output = top_states(loss) if output is None else output
    sgd = partial(torch.optim.SGD, lr=sgd_lr)
    adam = partial(torch.optim.Adam, lr=lr, betas=betas, eps=eps)
    return UpdateSizes(
        sgd_lr,
        lr,
        relative_update(model, loss, output, sgd, matrices),
        relative_update(model, loss, output, sgd, "all"),
        relative_update(model, loss, output, adam, matrices),
        relative_update(model, loss, output, adam, "all"),
    )
