"""DeepNet, Figure 9: other scales of the shortcut and of the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided
from kilolayer.reproduce.cells import Cell, cells_by, is_lower
from kilolayer.reproduce.stored_run import Run

if TYPE_CHECKING:
    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.lab import Lab

SCALES, FACTORS = ("alpha_scale", "beta_scale"), (0.25, 0.5, 1.0, 2.0, 4.0)


@register
class Figure9(Reproduction):
    """Alpha and beta times 1/4 to 4."""

    name = "deepnet-figure9"
    claim = (
        "A small shortcut scale and a large start make training unstable, and a large shortcut scale and a small start cost "
        "quality: the paper's alpha and beta strike the balance."
    )
    setting = (
        "German to English, Tatoeba for WMT-14 En-Fr, 18L-18L, dim 128, learning rate 1e-3, 2,000 steps of 4,096 tokens, 800 "
        "of them for warm-up, three seeds."
    )
    rule = (
        "Held if, for alpha and for beta, no factor is clearly lower than 1 (two standard errors and 0.02 nats), and at least "
        "one of alpha x 1/4 and beta x 4 dies or is clearly higher. Not held if for alpha and for beta some factor is clearly "
        "lower than 1, or 1 dies. Otherwise it is undecided."
    )

    def measure(self, lab: Lab) -> Found:
        layers, factors, seeds = (1, FACTORS[2:4], (1,)) if lab.tiny else (18, FACTORS, (1, 2, 3))
        model = {"recipe": {"name": "deepnorm"}, "encoder_layers": layers, "decoder_layers": layers}
        config = lab.translation(model=model, train=lab.gentle)
        options = {scale: f"model.recipe.{scale}" for scale in SCALES}
        settings = [{option: factor, "train.seed": seed} for option in options.values() for factor in factors for seed in seeds]
        runs = lab.compare_settings("deepnorm-scales", config, settings)
        return {scale: [run for run in runs if option in run["options"]] for scale, option in options.items()}

    def judge(self, found: Found) -> Verdict:
        rows = {option: _by_factor(found[option], option) for option in SCALES}
        better = {option: {factor: is_lower(cell, row[1.0]) for factor, cell in row.items()} for option, row in rows.items()}
        why = "; ".join(
            f"{option}: {', '.join(f'{f:g} {cell.shown}' for f, cell in row.items())}" for option, row in rows.items()
        )
        bases = [row[1.0] for row in rows.values()]
        if all(any(factors.values()) for factors in better.values()) or any(base.died for base in bases):
            return not_held(why)
        alpha, beta = rows["alpha_scale"], rows["beta_scale"]
        ends = (alpha[min(alpha)], alpha[1.0]), (beta[max(beta)], beta[1.0])
        hurts = any(cell.died or is_lower(base, cell) for cell, base in ends)
        best = all(cell.died or better[option][factor] is False for option, row in rows.items() for factor, cell in row.items())
        return held(why) if hurts and best else undecided(why)

    def numbers(self, found: Found) -> Table:
        rows = {option: _by_factor(found[option], option) for option in SCALES}
        factors = list(rows["alpha_scale"])
        header = ["validation loss", *(f"x {factor:g}" for factor in factors)]
        return Table(header, [[option, *(row[factor].shown for factor in factors)] for option, row in rows.items()])

    def panels(self, found: Found) -> list[Panel]:
        from kilolayer.reproduce.pictures import lines

        points = {
            option: [(factor, cell.loss) for factor, cell in _by_factor(found[option], option).items()] for option in SCALES
        }
        note = "Settings that did not live to the end leave a gap."
        title = "Validation loss by factor"
        return [lines(points, title, "factor on alpha or beta", "validation loss", log_x=True, note=note)]


def _by_factor(runs: list[Run], option: str) -> dict[float, Cell]:
    return cells_by(runs, f"model.recipe.{option}")
