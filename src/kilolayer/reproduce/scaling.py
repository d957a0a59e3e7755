"""The common part of TorchScale's Figures 1 and 2: scaling a model in depth, and in the number of experts."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, undecided
from kilolayer.reproduce.cells import Cell, cells_by, is_lower

if TYPE_CHECKING:
    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.lab import Lab

EXPERTS = "model.moe.experts"


class Scaling(Reproduction):
    """depths: numbers of layers (per side); expert_layers: the number of layers of the models with experts."""

    rule = (
        "Held if every model lives, and in depth and in experts the largest is clearly lower in validation loss (two standard "
        "errors and 0.02 nats) than the smallest. Not held if a model dies, or a largest is clearly higher than its smallest. "
        "Otherwise it is undecided."
    )
    depths: ClassVar[tuple[int, ...]]
    expert_layers: ClassVar[int]

    @abstractmethod
    def config(self, lab: Lab) -> dict[str, Any]:
        """The configuration of the model that is scaled."""

    def scale(self, lab: Lab, name: str) -> Found:
        """Train both families of models."""
        seeds = (1,) if lab.tiny else (1, 2)
        depths, layers, experts = ((1, 2), 2, (2, 4)) if lab.tiny else (self.depths, self.expert_layers, (16, 64, 256))
        deeper: list[dict[str, Any]] = [{"layers": depth} for depth in depths]
        sparse = [{"layers": layers, EXPERTS: count, "model.moe.every": 2, "train.clip_norm": 1.0} for count in experts]
        settings = [{**each, "train.seed": seed} for each in (*deeper, *sparse) for seed in seeds]
        runs = lab.compare_settings(f"magneto-{name}", self.config(lab), settings)
        return {
            "depth": [run for run in runs if EXPERTS not in run["options"]],
            "experts": [run for run in runs if EXPERTS in run["options"]],
        }

    def judge(self, found: Found) -> Verdict:
        families = [list(cells.values()) for cells in self._cells(found).values()]
        why = "; ".join(", ".join(cell.shown for cell in cells) for cells in families)
        if any(cell.died for cells in families for cell in cells):
            return not_held(why)
        if any(is_lower(cells[0], cells[-1]) for cells in families):
            return not_held(why)
        lives = all(cell.lives for cells in families for cell in cells)
        return held(why) if lives and all(is_lower(cells[-1], cells[0]) for cells in families) else undecided(why)

    def numbers(self, found: Found) -> Table:
        rows = [[f"{value} {name}", cell.shown] for name, cells in self._cells(found).items() for value, cell in cells.items()]
        return Table(["", "validation loss"], rows)

    def panels(self, found: Found) -> list[Panel]:
        from kilolayer.reproduce.pictures import curves, first_by

        titles = {"depth": ("layers", "Validation loss by depth"), "experts": (EXPERTS, "Validation loss by experts")}
        return [curves(first_by(found[key], option), "valid", title) for key, (option, title) in titles.items()]

    def _cells(self, found: Found) -> dict[str, dict[int, Cell]]:
        return {"layers": cells_by(found["depth"], "layers"), "experts": cells_by(found["experts"], EXPERTS)}
