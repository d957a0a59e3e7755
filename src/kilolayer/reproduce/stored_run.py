"""A run of a comparison as JSON values, as reproductions store it, and what they read of its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kilolayer.compare.grid import same
from kilolayer.compare.outcome import DIED
from kilolayer.files.reading import read_json

Run = dict[str, Any]
"""A run of a comparison as JSON values: its options, outcome, losses and scores."""


def died(run: Run) -> bool:
    """Whether a run diverged, died or ended without reading its source. One that had no time or failed proves nothing."""
    return run["outcome"] in DIED


def ended(run: Run) -> bool:
    """Whether the outcome of a run is known."""
    return run["outcome"] == "finished" or died(run)


def has(run: Run, setting: Mapping[str, Any]) -> bool:
    """Whether a run has the values of a setting, whatever else its options are."""
    return same({option: value for option, value in run["options"].items() if option in setting}, setting)


def keep(run: Run, key: str, read: Callable[[Path], Any]) -> Any:
    """What `read` finds in the folder of a run, kept in the run for sessions that do not have the folder; None without one."""
    if key not in run:
        folder = folder_of(run)
        run[key] = read(folder) if folder.is_dir() else None
    return run[key]


def folder_of(run: Run) -> Path:
    """The folder of a run. That of another session may be gone: only its name is then known."""
    return Path(run.get("folder") or run["name"]).resolve()


def scores_of(folder: Path) -> dict[str, Any]:
    """The scores of a run on its test sets; empty if it has none."""
    path = folder / "scores.json"
    return read_json(path) if path.exists() else {}
