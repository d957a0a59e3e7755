"""Which checkpoints the trained weights of a run are taken from."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from torch import Tensor

from kilolayer.errors import InputError
from kilolayer.files.tensors import Expected
from kilolayer.models.fit import expected_weights
from kilolayer.runs import checkpoint
from kilolayer.runs.last_saved import all_deleted, deleted
from kilolayer.runs.saved_state import fitted, regular_before
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.train_config import TrainConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chosen:
    """The steps of the checkpoints that are used, and why these; scores.json stores it as "weights".

    passed_over: steps of checkpoints that should have been used but cannot be.
    """

    chosen: str
    steps: list[int]
    passed_over: list[int]

    def table(self) -> dict[str, Any]:
        """The values for JSON."""
        return asdict(self)


def choose(folder: Path, config: RunConfig) -> Chosen:
    """The newest scheduled checkpoints if the run averages, else the best one if it saves that, else the newest.

    Each checkpoint that should be used but cannot be is logged, along with what is used instead.
    """
    faults: dict[int, str] = {}
    expected, train = expected_weights(config.model), config.train
    whole = _complete_checkpoints(checkpoint.steps(folder), expected, faults)
    newest = next(whole, None)
    if newest is None:
        if (gone := all_deleted(folder)) is not None:
            raise gone
        _warn(faults, "there is no other")
        raise InputError("the run has no complete checkpoint", where=str(folder), fix="train it first")
    if (step := deleted(folder)) is not None and step > checkpoint.step_of(newest):
        faults[step] = "missing, and it is the newest"
    if train.average:
        regular = list(islice(filter(checkpoint.is_scheduled, chain([newest], whole)), train.average))
        why, used = f"average of {train.average}", regular[::-1] or [newest]
        _find_missing(newest, regular, train.average, faults)
    else:
        why, used = _choose_one(newest, train, expected, faults)
    chosen = Chosen(why, [checkpoint.step_of(path) for path in used], sorted(faults))
    _warn(faults, f"the weights of step {', '.join(map(str, chosen.steps))} are used instead")
    return chosen


def _warn(faults: dict[int, str], instead: str) -> None:
    for step, fault in sorted(faults.items()):
        logger.warning("checkpoint of step %d is %s; %s", step, fault, instead)


def _complete_checkpoints(paths: list[Path], expected: Expected, faults: dict[int, str]) -> Iterator[Path]:
    """Yield complete checkpoints, newest first, checking each only when it is asked for; `faults` collects the others."""
    for path in reversed(paths):
        if (fault := checkpoint.find_fault(path, expected)) is None:
            yield path
        else:
            faults[checkpoint.step_of(path)] = f"damaged ({fault})"


def _find_missing(newest: Path, regular: list[Path], count: int, faults: dict[int, str]) -> None:
    """Add to `faults` those of the last `count` scheduled checkpoints that are gone; each one records its predecessor."""
    found = 0
    for path in dict.fromkeys([newest, *regular]):
        found += path in regular
        before = regular_before(checkpoint.load_state(path), path / "state.json")
        if before is None or found >= count:
            return
        if not os.path.lexists(checkpoint.path_of(path.parent, before)):
            faults[before] = "missing from the average"
        found += before in faults


def _choose_one(newest: Path, config: TrainConfig, expected: Expected, faults: dict[int, str]) -> tuple[str, list[Path]]:
    if not config.save_best:
        return "newest", [newest]
    state = fitted(checkpoint.load_state(newest), {"best": {"step": int | None}}, newest / "state.json")
    if (step := state["best"]["step"]) is None:
        return "newest", [newest]
    best = checkpoint.path_of(newest.parent, step)
    if best == newest:
        return "best", [best]
    if best not in checkpoint.steps(newest.parent):
        faults[step] = "missing, and it is the best"
    elif next(_complete_checkpoints([best], expected, faults), None) and checkpoint.is_scheduled(best):
        return "best", [best]
    return "newest", [newest]


def load_chosen(folder: Path, chosen: Chosen, expected: Expected, check: checkpoint.Check) -> dict[str, Tensor]:
    """The weights alone, without the optimizer's state, which is twice their size. expected, check: as for `load_tensors`."""
    paths = [checkpoint.path_of(folder, step) for step in chosen.steps]
    if len(paths) == 1:
        return checkpoint.read_tensors(paths[0], checkpoint.MODEL, expected, check)
    return checkpoint.average(paths, expected=expected, check=check)
