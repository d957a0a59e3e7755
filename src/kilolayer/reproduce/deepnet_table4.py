"""DeepNet, Table 4: deep and narrow against shallow and wide, at equal FLOPs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided

if TYPE_CHECKING:
    from kilolayer.reproduce.cells import Cell
    from kilolayer.reproduce.lab import Lab

# A quarter of the paper's widths and half of its depths: 11.0, 9.6 and 11.0 million weights without the tables.
MODELS = {
    "Post-LN 6L-6L, dim 256": ("post_ln", 6, 6, 256),
    "DeepNorm 45L-3L, dim 128": ("deepnorm", 45, 3, 128),
    "DeepNorm 24L-24L, dim 128": ("deepnorm", 24, 24, 128),
}


def model_of(name: str, tiny: bool) -> dict[str, Any]:
    """The options of one of the models; with `tiny`, of a very small model of the same kind."""
    recipe, encoder, decoder, dim = MODELS[name]
    if tiny:
        encoder, decoder, dim = 2, 1 if decoder < encoder else 2, 16
    return {"recipe": recipe, "encoder_layers": encoder, "decoder_layers": decoder, "dim": dim, "ffn_dim": 4 * dim}


@register
class Table4(Reproduction):
    """Post-LN, and DeepNorm with a shallow and with a deep decoder."""

    name = "deepnet-table4"
    claim = (
        "At equal training FLOPs the deep and narrow model is better than the shallow and wide one, and a deep decoder is "
        "worth more than a still deeper encoder."
    )
    setting = (
        "31 languages to and from English, Tatoeba for OPUS-100; 6L-6L of dim 256, 45L-3L and 24L-24L of dim 128; 2,000 steps "
        "of 4,096 tokens, 800 of them for warm-up; the better of learning rates 5e-4 and 1e-3, two seeds."
    )
    rule = (
        "Held if 24L-24L is clearly lower in validation loss (two standard errors and 0.02 nats) than both others. Not held if "
        "Post-LN or 45L-3L is clearly lower than it. Otherwise it is undecided."
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
        rates, seeds = ((5e-3,), (1,)) if lab.tiny else ((5e-4, 1e-3), (1, 2))
        models = {name: {f"model.{option}": value for option, value in model_of(name, lab.tiny).items()} for name in MODELS}
        settings = [
            {**model, "train.lr": rate, "train.seed": seed} for model in models.values() for rate in rates for seed in seeds
        ]
        runs = lab.compare_settings("equal-flops", lab.multilingual(train=lab.gentle), settings)
        return {name: [run for run in runs if model.items() <= run["options"].items()] for name, model in models.items()}

    def judge(self, found: Found) -> Verdict:
        from kilolayer.reproduce.cells import is_lower

        wide, uneven, even = (self._cell(found, name) for name in MODELS)
        why = f"6L-6L {wide.shown}, 45L-3L {uneven.shown}, 24L-24L {even.shown}"
        if is_lower(wide, even) or is_lower(uneven, even):
            return not_held(why)
        return held(why) if is_lower(even, wide) and is_lower(even, uneven) else undecided(why)

    def numbers(self, found: Found) -> Table:
        return Table(["", "validation loss (mean BLEU)"], [[name, self._cell(found, name).shown] for name in MODELS])

    def _cell(self, found: Found, name: str) -> Cell:
        from kilolayer.reproduce.cells import cell_of

        cell = cell_of(found[name])
        assert cell is not None
        return cell
