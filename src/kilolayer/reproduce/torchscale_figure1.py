"""TorchScale, Figure 1: deeper language models, and more experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilolayer.reproduce.base import Found, register
from kilolayer.reproduce.scaling import Scaling

if TYPE_CHECKING:
    from kilolayer.config import Table
    from kilolayer.reproduce.lab import Lab


@register
class Figure1(Scaling):
    """Magneto as a language model at 12 to 96 layers, and with 16 to 256 experts."""

    name = "torchscale-figure1"
    claim = (
        "Magneto's language models converge smoothly at 12 to 96 layers and with 16 to 256 experts, and the larger are "
        "the better."
    )
    setting = (
        "Books, Sub-LN, dim 128, 1,000 steps of 4,096 tokens, learning rate 1e-3, two seeds; 12, 24, 48 and 96 layers; 12 "
        "layers with 16, 64 and 256 experts in every second one, top-2, SparseClip at norm 1.0."
    )
    depths, expert_layers = (12, 24, 48, 96), 12

    def config(self, lab: Lab) -> Table:
        return lab.language(model={"recipe": "sub_ln"})

    def measure(self, lab: Lab) -> Found:
        return self.scale(lab, "language")
