"""DeepNet, Table 4: deep and narrow against shallow and wide, at equal FLOPs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided
from kilolayer.reproduce.cells import Cell, is_lower, named_cells
from kilolayer.reproduce.deepnet_table3 import BASELINE_TRAINS, EIGHT_LANGUAGES, NO_TRANSLATION, eight_languages, untranslated
from kilolayer.reproduce.stored_run import has
from kilolayer.reproduce.sweep import at_best_rate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kilolayer.config import Table as ConfigTable
    from kilolayer.reproduce.lab import Lab

# A quarter of the paper's widths and half of its depths: 11.1, 9.7 and 11.1 million weights without the tables.
MODELS = {
    "Post-LN 6L-6L, dim 256": ("post_ln", 6, 6, 256),
    "DeepNorm 45L-3L, dim 128": ("deepnorm", 45, 3, 128),
    "DeepNorm 24L-24L, dim 128": ("deepnorm", 24, 24, 128),
}
RATES, SEEDS = (2.5e-4, 5e-4, 1e-3), (1, 2, 3)
RATES_TEXT = (
    f"Learning rates as in deepnet-table1, from {RATES[0]:g} to {RATES[-1]:g} and beyond where the best one is at an end, "
    "three seeds at the two best."
)


def best_of_models(lab: Lab, name: str, config: ConfigTable, models: Mapping[str, tuple[str, int, int, int]]) -> Found:
    """Train models of given recipe, depths and width at their best rates; returns the runs by the name of the model.

    not_chosen: the runs at the other rates. With a lab for the tiny form, very small models of the same kinds.
    """
    settings = {title: _setting(*model, tiny=lab.tiny) for title, model in models.items()}
    found = at_best_rate(lab, name, config, list(settings.values()), RATES, SEEDS)
    chosen = {title: [run for run in found["runs"] if has(run, setting)] for title, setting in settings.items()}
    return chosen | {"not_chosen": found["not_chosen"]}


def _setting(recipe: str, encoder: int, decoder: int, dim: int, *, tiny: bool) -> dict[str, Any]:
    heads = dim // 32  # each of the same width, as in the paper
    if tiny:
        encoder, decoder, dim, heads = 2, 1 if decoder < encoder else 2, 16, 2
    sizes = {"encoder_layers": encoder, "decoder_layers": decoder, "dim": dim, "ffn_dim": 4 * dim, "heads": heads}
    return {"model.recipe": recipe, **{f"model.{option}": value for option, value in sizes.items()}}


@register
class Table4(Reproduction):
    """Post-LN, and DeepNorm with a shallow and with a deep decoder."""

    name = "deepnet-table4"
    claim = (
        "At equal training FLOPs the deep and narrow model is better than the shallow and wide one, and a deep decoder is "
        "worth more than a still deeper encoder."
    )
    setting = (
        f"{EIGHT_LANGUAGES}; 6L-6L of dim 256, 45L-3L and 24L-24L of dim 128, with 11.1, 9.7 and 11.1 million weights without "
        f"the tables. {RATES_TEXT}"
    )
    rule = (
        f"{BASELINE_TRAINS} {NO_TRANSLATION} 24L-24L is clearly lower in validation loss (two standard errors and 0.02 nats) "
        "than both others. Not held if Post-LN or 45L-3L is clearly lower than it. Otherwise it is undecided."
    )
    published = Table(
        ["OPUS-100", "weights", "X to En", "En to X", "mean BLEU"],
        [
            ["Post-LN 12L-12L, dim 1024", "610M", "33.1", "28.9", "31.0"],
            ["DeepNet 90L-6L, dim 512", "480M", "33.6", "28.6", "31.1"],
            ["DeepNet 48L-48L, dim 512", "480M", "33.7", "29.5", "31.6"],
        ],
    )

    def measure(self, lab: Lab) -> Found:
        return best_of_models(lab, "equal-flops", eight_languages(lab), MODELS)

    def judge(self, found: Found) -> Verdict:
        wide, uneven, even = self._cells(found).values()
        why = f"6L-6L {wide.shown}, 45L-3L {uneven.shown}, 24L-24L {even.shown}"
        if not all(cell.ended for cell in (wide, uneven, even)):
            return undecided(f"some runs have no result; {why}")
        if wide.died:
            return undecided(f"the baseline does not train; {why}")
        if reason := untranslated((wide.bleu, uneven.bleu, even.bleu)):
            return undecided(f"{reason}; {why}")
        if is_lower(wide, even) or is_lower(uneven, even):
            return not_held(why)
        return held(why) if is_lower(even, wide) and is_lower(even, uneven) else undecided(why)

    def numbers(self, found: Found) -> Table:
        rows = [[name, f"{cell.options['train.lr']:g}", cell.shown] for name, cell in self._cells(found).items()]
        return Table(["", "learning rate", "validation loss (mean BLEU)"], rows)

    def _cells(self, found: Found) -> dict[str, Cell]:
        return named_cells({name: found[name] for name in MODELS})
