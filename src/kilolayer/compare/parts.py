"""What is printed about a comparison."""

from __future__ import annotations

from collections.abc import Sequence

from kilolayer.compare.comparison import Comparison
from kilolayer.compare.grid import shown_value
from kilolayer.compare.table import ComparisonTable, tabulate
from kilolayer.compare.verdicts import Verdict, against_best
from kilolayer.compare.view import view_of
from kilolayer.display import Line, Part, Pictures, TitledTable
from kilolayer.report.comparison_page import plots_of

WORDS = {"+": "better", "-": "worse", "=": "no significant difference"}


def parts_of(comparison: Comparison) -> list[Part]:
    """What `kilolayer compare` prints about the current state of the runs; in HTML also the plots of its page."""
    results = comparison.results()
    table = tabulate(comparison, results)
    verdicts = against_best(table)
    pictures = Pictures(lambda: plots_of(view_of(comparison, results, table, verdicts)))
    return [*table_parts(table, verdicts), pictures]


def table_parts(table: ComparisonTable, verdicts: Sequence[Verdict]) -> list[Part]:
    """The cells by each measure, the best setting in each cell, and how significant the differences are."""
    parts: list[Part] = [TitledTable(measure.title, table.lines(measure), table.header(measure)) for measure in table.measures]
    chosen = [cell for cell in table.cells if cell.best.alive]
    if any(cell.best.options and cell.tried > 1 for cell in chosen):
        names = list(dict.fromkeys(name for cell in chosen for name in cell.best.options))
        rows = [
            [table.title_of(cell), *(shown_value(name, cell.best.options.get(name)) for name in names), str(cell.tried)]
            for cell in chosen
        ]
        parts.append(TitledTable(f"the best of each cell, by {table.chosen_by.title}", rows, ["", *names, "tried"]))
    if verdicts:
        title = f"{verdicts[0].significance.metric} against {verdicts[0].best}"
        parts.append(TitledTable(title, [_row(each) for each in verdicts], ["", "difference", "p", ""]))
    return [*parts, *map(Line, table.notes)]


def _row(verdict: Verdict) -> list[str]:
    found = verdict.significance
    return [verdict.title, f"{found.difference.value:+.2f}", f"{found.p_value:.3f}", WORDS[found.verdict]]
