"""The documents of a comparison: comparison.json with all results, and the HTML page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kilolayer.compare.comparison import Comparison
from kilolayer.compare.grid import axes_of
from kilolayer.compare.result import Result
from kilolayer.compare.table import ComparisonTable, as_json, tabulate
from kilolayer.compare.verdicts import Verdict, against_best
from kilolayer.compare.view import view_of
from kilolayer.files.writing import make_folder, write
from kilolayer.report.comparison_page import write_comparison_page
from kilolayer.tasks.results import tables_of_tests


def write_documents(comparison: Comparison) -> tuple[ComparisonTable, list[Verdict]]:
    """Write both documents from the current state of the runs; return the table and the verdicts on its cells."""
    make_folder(comparison.folder)
    results = comparison.results()
    table = tabulate(comparison, results)
    verdicts = against_best(table)
    document = as_document(comparison, results, table, verdicts)
    write(comparison.folder / "comparison.json", json.dumps(document, indent=1) + "\n")
    write_comparison_page(comparison.folder / "comparison.html", view_of(comparison, results, table, verdicts))
    return table, verdicts


def as_document(
    comparison: Comparison, results: Sequence[Result], table: ComparisonTable, verdicts: Sequence[Verdict]
) -> dict[str, Any]:
    """All results as plain values: the runs with their validations, the table, and the significance of its differences."""
    return {
        "task": None if comparison.task is None else comparison.task.name,
        "axes": {axis.name: list(axis.values) for axis in axes_of(result.options for result in results)},
        "runs": [_run(result, comparison.folder) for result in results],
        "table": as_json(table),
        "significance": [verdict.table() for verdict in verdicts],
    }


def _run(result: Result, folder: Path) -> dict[str, Any]:
    path = result.folder.relative_to(folder) if result.folder.is_relative_to(folder) else result.folder
    seconds = result.seconds
    return {
        "name": result.name,
        "folder": str(path),
        "options": result.options,
        "outcome": {"kind": result.outcome.kind, "step": result.outcome.step, "text": result.outcome.text},
        "seconds": None if seconds is None or math.isnan(seconds) else seconds,
        "train": result.train[-1] if result.train else None,
        "valid": [{key: value for key, value in row.items() if key != "kind"} for row in result.valid],
        "scores": tables_of_tests(result.scores),
    }
