"""Reproductions that are one comparison: a grid of runs by two options."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction

if TYPE_CHECKING:
    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.cells import Cell
    from kilolayer.reproduce.lab import Lab, Run


class Sweep(Reproduction):
    """row, column: the options of the grid; column_title: the second one in words, for the table and the picture."""

    row: ClassVar[str] = "model.recipe"
    column: ClassVar[str] = "layers"
    column_title: ClassVar[str] = "layers a side"

    @abstractmethod
    def runs(self, lab: Lab) -> list[Run]:
        """Train the runs of the grid."""

    def measure(self, lab: Lab) -> Found:
        return {"runs": self.runs(lab)}

    def grid(self, found: Found) -> dict[str, dict[Any, Cell]]:
        """The best cell of each row and column."""
        from kilolayer.reproduce.cells import grid_of

        return grid_of(found["runs"], self.row, self.column)

    def numbers(self, found: Found) -> Table:
        from kilolayer.reproduce.cells import grid_numbers

        return grid_numbers(self.grid(found), f"validation loss by {self.column_title}")

    def panels(self, found: Found) -> list[Panel]:
        from kilolayer.reproduce.pictures import by_column

        return [by_column(found["runs"], self.row, self.column, self.column_title, f"Validation loss by {self.column_title}")]
