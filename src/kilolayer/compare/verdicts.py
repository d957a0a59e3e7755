"""Whether the cells of a table differ from the best one by more than the choice of test sentences can explain."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kilolayer.compare.table import Cell, ComparisonTable
from kilolayer.errors import KilolayerError
from kilolayer.evaluate.significance import SAMPLES, paired_bootstrap
from kilolayer.evaluate.significance import Comparison as Significance
from kilolayer.runs.run import Run, cache_folder
from kilolayer.tasks.task import Answers


@dataclass(frozen=True)
class Verdict:
    """A cell compared with the best one, using the first seed of each that finished."""

    title: str
    run: str
    best: str
    significance: Significance

    def table(self) -> dict[str, Any]:
        """The verdict as plain values."""
        return {"cell": self.title, "run": self.run, "against": self.best, **asdict(self.significance)}


def against_best(table: ComparisonTable, samples: int = SAMPLES) -> list[Verdict]:
    """Compare every cell with the best one by a paired bootstrap, if the runs kept their output on the same test set."""
    best = table.best()
    if best is None or len(table.cells) < 2 or (ours := _answers(best)) is None:
        return []
    verdicts = []
    for cell in table.cells:
        if cell is best or (theirs := _answers(cell)) is None or theirs.references != ours.references:
            continue
        found = paired_bootstrap(ours.hypotheses, theirs.hypotheses, ours.references, samples=samples)
        verdicts.append(Verdict(table.title_of(cell), cell.best.alive[0].name, best.best.alive[0].name, found))
    return verdicts


def _answers(cell: Cell) -> Answers | None:
    """The references and the run's output; None if none was kept, or the references are no longer there."""
    if not cell.best.alive:
        return None
    folder = cell.best.alive[0].folder
    try:
        run = Run.open(folder)
        return run.registration.load().answers(run.config, folder, cache_folder())
    except KilolayerError:
        return None
