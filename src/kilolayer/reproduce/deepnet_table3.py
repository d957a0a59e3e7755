"""DeepNet, Table 3: depth on many languages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Verdict, held, not_held, register, undecided
from kilolayer.reproduce.cells import is_lower
from kilolayer.reproduce.stored_run import Run
from kilolayer.reproduce.sweep import Sweep

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kilolayer.config import Table as ConfigTable
    from kilolayer.reproduce.lab import Lab

EIGHT_LANGUAGES = (
    "The eight largest languages of Tatoeba to and from English for OPUS-100, 4,000 steps of 8,192 tokens, 1,600 of them for "
    "warm-up"
)
LEAST_BLEU = 10.0
BASELINE_TRAINS = (
    "Undecided if Post-LN dies or does not read its source, in one seed or more, even at its best rate: the baseline does not "
    "train."
)
NO_TRANSLATION = f"Undecided if the mean BLEU of the best model is below {LEAST_BLEU:g}. Else held if"


def eight_languages(lab: Lab) -> ConfigTable:
    """The configuration that Tables 3, 4 and 5 share."""
    return lab.multilingual(8, batches={"tokens": 8192}, train=lab.long)


def depths_of_eight_languages(lab: Lab) -> list[Run]:
    """Train DeepNorm at five depths; Figure 8 plots the same runs."""
    axes = {"model.recipe": ("deepnorm",), "layers": (6, 12, 24, 50, 100), "train.seed": (1, 2)}
    if lab.tiny:
        axes = {"model.recipe": ("deepnorm",), "layers": (1, 2), "train.seed": (1,)}
    return lab.compare("eight-languages", eight_languages(lab), axes)


def untranslated(scores: Iterable[float | None]) -> str | None:
    """Why models with these mean BLEUs decide nothing, if none of them translates; None if one does."""
    best = max((score for score in scores if score is not None), default=0.0)
    return None if best >= LEAST_BLEU else f"no model translates: the best mean BLEU is {best:.1f}"


@register
class Table3(Sweep):
    """12 to 200 layers."""

    name = "deepnet-table3"
    claim = "On many languages depth pays: 200 layers are 3.4 BLEU above 48, and 1,000 another point."
    setting = (
        f"{EIGHT_LANGUAGES}, learning rate 1e-3, dim 128, DeepNorm at 12, 24, 48, 100 and 200 layers, two seeds. 1,000 layers "
        "are not among them."
    )
    rule = (
        f"{NO_TRANSLATION} the deepest model's validation loss is clearly lower (two standard errors and 0.02 nats) than that "
        "of 48 layers, and that than 12's. Not held if the deepest is clearly higher than 48. Otherwise it is undecided."
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
        return {"runs": depths_of_eight_languages(lab)}

    def judge(self, found: Found) -> Verdict:
        cells = list(self.grid(found)["deepnorm"].values())
        first, middle, last = cells[0], cells[len(cells) // 2], cells[-1]
        why = ", ".join(cell.shown for cell in cells)
        if not all(cell.ended for cell in cells):
            return undecided(f"some runs have no result; {why}")
        if reason := untranslated(cell.bleu for cell in cells):
            return undecided(f"{reason}; {why}")
        if is_lower(middle, last):
            return not_held(why)
        return held(why) if is_lower(last, middle) and is_lower(middle, first) else undecided(why)
