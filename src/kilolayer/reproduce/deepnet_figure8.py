"""DeepNet, Figure 8: the score grows with the logarithm of depth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Verdict, held, not_held, register, undecided
from kilolayer.reproduce.deepnet_table3 import NO_TRANSLATION, depths_of_eight_languages, untranslated
from kilolayer.reproduce.sweep import Sweep

if TYPE_CHECKING:
    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.lab import Lab


@register
class Figure8(Sweep):
    """Mean BLEU = A log(depth) + B."""

    name = "deepnet-figure8"
    claim = "The mean BLEU of many languages grows with the logarithm of the depth."
    setting = "The runs of deepnet-table3: 12 to 200 layers, mean BLEU of 16 directions, two seeds."
    rule = (
        "A line over the logarithm of all layers is fitted to the mean BLEU of each depth. Undecided if a depth dies in a "
        f"seed. {NO_TRANSLATION} A is above 0 by two of its standard errors and the line explains at least 0.9 of the "
        "variance. Not held if A is below 0 by two standard errors, or the line explains less than 0.5. Otherwise it is "
        "undecided."
    )

    def measure(self, lab: Lab) -> Found:
        return {"runs": depths_of_eight_languages(lab)}

    def judge(self, found: Found) -> Verdict:
        from kilolayer.evaluate.log_fit import fit_log

        points, cells = self.points(found), list(self.grid(found)["deepnorm"].values())
        if not all(cell.ended for cell in cells):
            return undecided("some runs have no result")
        if reason := untranslated(cell.bleu for cell in cells):
            return undecided(reason)
        if len(points) < max(4, len(cells)):
            return undecided(f"{len(points)} of {len(cells)} depths have a score in every seed")
        line = fit_log([depth for depth, _ in points], [score for _, score in points])
        law = f"BLEU = {line.slope:.2f} (± {line.slope_error:.2f}) log(depth) + {line.intercept:.2f}"
        why = f"{law}, R^2 {line.r2:.3f}, error of a depth that was left out {line.left_out_error:.2f}"
        if line.slope < -2 * line.slope_error or line.r2 < 0.5:
            return not_held(why)
        return held(why) if line.slope > 2 * line.slope_error and line.r2 >= 0.9 else undecided(why)

    def points(self, found: Found) -> list[tuple[float, float]]:
        """Pairs of the number of layers in both stacks and the mean BLEU."""
        cells = self.grid(found)["deepnorm"].items()
        return [(2.0 * float(str(depth)), cell.bleu) for depth, cell in cells if cell.lives and cell.bleu is not None]

    def numbers(self, found: Found) -> Table:
        return Table(["layers", "mean BLEU"], [[f"{depth:g}", f"{score:.2f}"] for depth, score in self.points(found)])

    def panels(self, found: Found) -> list[Panel]:
        from kilolayer.reproduce.pictures import depth_law

        return [depth_law(self.points(found), "Mean BLEU by depth", "mean BLEU")]
