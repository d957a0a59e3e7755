"""TorchScale, Figure 2: deeper translators, and more experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilolayer.reproduce.base import Found, register
from kilolayer.reproduce.scaling import Scaling

if TYPE_CHECKING:
    from kilolayer.config import Table
    from kilolayer.reproduce.lab import Lab


@register
class Figure2(Scaling):
    """Magneto as an encoder-decoder at 12 to 96 layers per side, and with 16 to 256 experts."""

    name = "torchscale-figure2"
    claim = "Magneto's translators are stable at 12L-12L to 96L-96L and with 16 to 256 experts, and the larger are the better."
    setting = (
        "31 languages to and from English, Tatoeba, Sub-LN, dim 128, 1,000 steps of 4,096 tokens, learning rate 1e-3, two "
        "seeds; 12, 24, 48 and 96 layers per side; 6L-6L with 16, 64 and 256 experts in every second layer, top-2, "
        "SparseClip at norm 1.0."
    )
    depths, expert_layers = (12, 24, 48, 96), 6

    def config(self, lab: Lab) -> Table:
        return lab.multilingual(model={"recipe": "sub_ln"})

    def measure(self, lab: Lab) -> Found:
        return self.scale(lab, "translation")
