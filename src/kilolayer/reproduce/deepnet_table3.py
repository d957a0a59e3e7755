"""DeepNet, Table 3: depth on many languages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Verdict, held, not_held, register, undecided
from kilolayer.reproduce.sweep import Sweep

if TYPE_CHECKING:
    from kilolayer.reproduce.lab import Lab, Run


def depths_of_many_languages(lab: Lab) -> list[Run]:
    """Train DeepNorm at five depths; Figure 8 plots the same runs."""
    axes = {"model.recipe": ("deepnorm",), "layers": (6, 12, 24, 50, 100), "train.seed": (1, 2)}
    if lab.tiny:
        axes = {"model.recipe": ("deepnorm",), "layers": (1, 2), "train.seed": (1,)}
    return lab.compare("many-languages", lab.multilingual(train={**lab.gentle, "stop_when_dead": True}), axes)


@register
class Table3(Sweep):
    """12 to 200 layers."""

    name = "deepnet-table3"
    claim = "On many languages depth pays: 200 layers are 3.4 BLEU above 48, and 1,000 another point."
    setting = (
        "31 languages to and from English, Tatoeba for OPUS-100, dim 128, DeepNorm at 12, 24, 48, 100 and 200 layers, 2,000 "
        "steps of 4,096 tokens, learning rate 5e-4 after 800 steps, two seeds. 1,000 layers are not among them."
    )
    rule = (
        "Held if the deepest model's validation loss is clearly lower (two standard errors and 0.02 nats) than that of 48 "
        "layers, and that than 12's. Not held if the deepest is clearly higher than 48. Otherwise it is undecided."
    )
    published = Table(
        ["BLEU, OPUS-100", "X to En", "En to X", "mean"],
        [
            ["12 layers (baseline)", "27.5", "21.4", "24.5"],
            ["24 layers (baseline)", "29.5", "22.9", "26.2"],
            ["48 layers (baseline)", "31.4", "24.0", "27.7"],
            ["200 layers (DeepNet)", "33.2", "29.0", "31.1"],
            ["1,000 layers (DeepNet)", "33.9", "30.2", "32.1"],
        ],
    )

    def measure(self, lab: Lab) -> Found:
        return {"runs": depths_of_many_languages(lab)}

    def judge(self, found: Found) -> Verdict:
        from kilolayer.reproduce.cells import is_lower

        cells = list(self.grid(found)["deepnorm"].values())
        first, middle, last = cells[0], cells[len(cells) // 2], cells[-1]
        why = ", ".join(cell.shown for cell in cells)
        if is_lower(middle, last):
            return not_held(why)
        return held(why) if is_lower(last, middle) and is_lower(middle, first) else undecided(why)
