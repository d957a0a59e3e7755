"""DeepNet, Table 11: without DeepNorm's shortcut, and without its start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Verdict, held, not_held, register, undecided
from kilolayer.reproduce.cells import is_lower
from kilolayer.reproduce.sweep import Sweep, at_best_rate

if TYPE_CHECKING:
    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.lab import Lab

RATES, SEEDS = (5e-4, 1e-3, 2e-3), (1, 2, 3)


@register
class Table11(Sweep):
    """Alpha 1 with beta kept, and beta 1 with alpha kept."""

    name = "deepnet-table11"
    claim = "Without DeepNorm's shortcut scale an 18L-18L model diverges; without its initialization it is slightly worse."
    setting = (
        "German to English, Tatoeba for WMT-14 En-Fr, 18L-18L, dim 128, 2,000 steps of 4,096 tokens, 800 of them for warm-up; "
        f"learning rates as in deepnet-table1, from {RATES[0]:g} to {RATES[-1]:g} and beyond where the best one is at an end, "
        "three seeds at the two best. Both at 1 is Post-LN at Xavier's deviation."
    )
    rule = (
        "Held if DeepNorm lives, alpha = 1 dies or is clearly higher (two standard errors and 0.02 nats), and beta = 1 is not "
        "clearly lower. Not held if alpha = 1 or beta = 1 is clearly lower, or DeepNorm dies. Otherwise it is undecided."
    )
    published = Table(
        ["WMT-14 En-Fr, 36 layers", "BLEU"], [["DeepNorm", "42.4"], ["alpha = 1", "diverged"], ["beta = 1", "42.2"]]
    )
    row, column, column_title = "model.recipe.alpha", "model.recipe.beta", "alpha (rows) and beta (columns)"

    def measure(self, lab: Lab) -> Found:
        from kilolayer.reproduce.lab import combinations

        layers = 1 if lab.tiny else 18
        model = {"recipe": {"name": "deepnorm"}, "encoder_layers": layers, "decoder_layers": layers}
        settings = combinations({self.row: ("derived", "one"), self.column: ("derived", "one")})
        config = lab.translation(model=model, train=lab.gentle)
        return at_best_rate(lab, "deepnorm-ablation", config, settings, RATES, SEEDS)

    def judge(self, found: Found) -> Verdict:
        grid = self.grid(found)
        whole, alpha, beta = grid["derived"]["derived"], grid["one"]["derived"], grid["derived"]["one"]
        why = f"DeepNorm {whole.shown}, alpha = 1 {alpha.shown}, beta = 1 {beta.shown}"
        if whole.died or is_lower(alpha, whole) or is_lower(beta, whole):
            return not_held(why)
        hurts = alpha.died or is_lower(whole, alpha)
        not_better = beta.died or is_lower(beta, whole) is False
        return held(why) if whole.lives and hurts and not_better else undecided(why)

    def panels(self, found: Found) -> list[Panel]:
        return []  # a table of four
