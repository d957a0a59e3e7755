"""Writes metrics.jsonl, one JSON object per line, and passes each row to the trackers."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from kilolayer.files.writing import append, json_value, write
from kilolayer.report.metric_rows import read_rows
from kilolayer.runs.trackers import Tracker

logger = logging.getLogger(__name__)
Kind = Literal["train", "valid", "layers", "stacks", "routing", "event", "reference"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""The kinds of rows."""


class Metrics:
    """Appends rows to a run's metrics. A resumed run first drops the rows written after its checkpoint.

    trackers: already started. validated: the step of the last validation that the checkpoint includes, if it may be before
    `step`.
    """

    def __init__(self, folder: Path, step: int, trackers: Sequence[Tracker] = (), validated: int | None = None) -> None:
        self.path, self.trackers = folder / "metrics.jsonl", trackers
        rows = read_rows(self.path)
        if rows.warning is not None:
            logger.warning("%s: %s", self.path, rows.warning)
        last = {"valid": step if validated is None else validated}
        kept = (row for row in rows.rows if row["step"] <= last.get(row["kind"], step))
        write(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def write(self, kind: Kind, step: int, **values: Any) -> None:
        """Write one row; numbers that are not finite are written as null."""
        row = {"kind": kind, "step": step, **json_value(values)}
        append(self.path, json.dumps(row) + "\n")
        for tracker in self.trackers:
            tracker.log(row)


class NullMetrics(Metrics):
    """The metrics of every process but the first, which alone writes them."""

    def __init__(self) -> None:
        self.trackers = ()

    def write(self, kind: Kind, step: int, **values: Any) -> None:
        """Do nothing: the first process writes the row."""


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run so far; broken or incomplete lines are left out."""
    return read_rows(folder / "metrics.jsonl").rows
