"""metrics.jsonl: one JSON object a line, and TensorBoard beside it on request."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from kilolayer.errors import OptionError
from kilolayer.files.writing import append, make_folder, write
from kilolayer.training.metric_rows import read_rows

logger = logging.getLogger(__name__)


class Metrics:
    """Appends to a run's metrics. A resumed run first drops what was written after its checkpoint.

    validated: the step of the last validation that the checkpoint knows of, where that may be before `step`.
    """

    def __init__(self, folder: Path, step: int, tensorboard: bool, validated: int | None = None) -> None:
        self.path = folder / "metrics.jsonl"
        found = read_rows(self.path)
        if found.warning is not None:
            logger.warning("%s: %s", self.path, found.warning)
        last = {"valid": step if validated is None else validated}
        kept = (row for row in found.rows if row["step"] <= last.get(row["kind"], step))
        write(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        if tensorboard:
            make_folder(folder / "tensorboard")
        # TensorBoard forgets the events of this step and later: a resumed run writes them again.
        self.board = summary_writer()(str(folder / "tensorboard"), purge_step=step + 1) if tensorboard else None

    def write(self, kind: str, step: int, **values: Any) -> None:
        """One line; numbers that are not finite are written as null."""
        row = {"kind": kind, "step": step, **_finite(values)}
        append(self.path, json.dumps(row) + "\n")
        if self.board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self.board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Write out what TensorBoard still holds back."""
        if self.board is not None:
            self.board.close()


class Unwritten(Metrics):
    """The metrics of a process that is not the first of a run: they are the first's, which writes them."""

    def __init__(self) -> None:
        self.board = None

    def write(self, kind: str, step: int, **values: Any) -> None:
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


def summary_writer() -> Any:
    """TensorBoard's writer, a class; refuses where the package is missing."""
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        raise OptionError(
            "the package tensorboard is not installed",
            where="train.tensorboard",
            fix="pip install tensorboard, or set it to false",
        ) from None
    return SummaryWriter
