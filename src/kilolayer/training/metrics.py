"""metrics.jsonl: one JSON object a line, which trackers are given too."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from kilolayer.files.writing import append, write
from kilolayer.training.metric_rows import read_rows
from kilolayer.training.trackers import Tracker

logger = logging.getLogger(__name__)
Kind = Literal["train", "valid", "layers", "routing", "event", "reference"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""What a row is about."""


class Metrics:
    """Appends to a run's metrics. A resumed run first drops what was written after its checkpoint.

    trackers: have been started. validated: the step of the last validation that the checkpoint knows of, where that may be
    before `step`.
    """

    def __init__(self, folder: Path, step: int, trackers: Sequence[Tracker] = (), validated: int | None = None) -> None:
        self.path, self.trackers = folder / "metrics.jsonl", trackers
        found = read_rows(self.path)
        if found.warning is not None:
            logger.warning("%s: %s", self.path, found.warning)
        last = {"valid": step if validated is None else validated}
        kept = (row for row in found.rows if row["step"] <= last.get(row["kind"], step))
        write(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def write(self, kind: Kind, step: int, **values: Any) -> None:
        """One line; numbers that are not finite are written as null."""
        row = {"kind": kind, "step": step, **_finite(values)}
        append(self.path, json.dumps(row) + "\n")
        for tracker in self.trackers:
            tracker.log(row)


class Unwritten(Metrics):
    """The metrics of a process that is not the first of a run: they are the first's, which writes them."""

    def __init__(self) -> None:
        self.trackers = ()

    def write(self, kind: Kind, step: int, **values: Any) -> None:
        """Leave it to the first."""


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run so far; lines that are broken or were cut short are left out."""
    return read_rows(folder / "metrics.jsonl").rows


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case _:
            return value
