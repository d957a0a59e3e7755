"""Records the step of a run's last saved checkpoint next to the checkpoints, so that a deleted one is noticed."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from kilolayer import hints
from kilolayer.errors import InputError, WriteError
from kilolayer.files.paths import kind_of
from kilolayer.files.reading import read_json
from kilolayer.files.writing import write
from kilolayer.runs import checkpoint

NAME = "last_checkpoint.json"


def record_saved(checkpoints: Path, step: int) -> None:
    """Record that the checkpoint of a step is complete; if the disk is full, only this record is lost."""
    with suppress(WriteError):
        write(checkpoints.parent / NAME, json.dumps({"step": step}))


def last_saved(checkpoints: Path) -> int | None:
    """The step of the last saved checkpoint; None if none was saved or none is recorded."""
    path = checkpoints.parent / NAME
    try:
        table = None if kind_of(path) is None else read_json(path, 1 << 10)
    except InputError:
        return None
    match table:
        case {"step": int(step)} if not isinstance(step, bool) and 0 <= step < 10**18:
            return step
    return None


def deleted(checkpoints: Path) -> int | None:
    """The step of the last saved checkpoint if it is no longer there; None if it is there, or none was saved."""
    step = last_saved(checkpoints)
    return None if step is None or os.path.lexists(checkpoint.path_of(checkpoints, step)) else step


def all_deleted(checkpoints: Path) -> InputError | None:
    """The error for a run that has saved checkpoints but no longer has any; None if it has some, or never saved one."""
    step = deleted(checkpoints)
    finished = kind_of(checkpoints.parent / "scores.json") is not None
    if any(kind_of(path) == "folder" for path in checkpoint.steps(checkpoints)) or (step is None and not finished):
        return None
    reached = "the run is finished" if step is None else f"the last one was of step {step}"
    anew = hints.call("train", checkpoints.parent / "config.toml", run="runs/NAME")
    return InputError(
        f"the checkpoints of this run have been deleted; {reached}",
        where=str(checkpoints),
        fix=f"restore them, or train again in another folder: {anew}",
    )
