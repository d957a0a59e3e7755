"""Comparisons from Python: `kl.run_comparison` and `kl.compare_runs`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from kilolayer.compare.comparison import Comparison
from kilolayer.compare.documents import write_documents
from kilolayer.compare.grid import Axis
from kilolayer.compare.queue import run_all
from kilolayer.errors import InputError, shown
from kilolayer.training.stop import Stopped

Axes = Mapping[str, Sequence[Any]] | Sequence[Axis]


def run_comparison(
    config: str | PathLike[str] | None,
    axes: Axes,
    *,
    folder: str | PathLike[str],
    options: Mapping[str, Any] | None = None,
    parallel: int | None = None,
    seconds: float | None = None,
) -> Comparison:
    """Train every combination of values, `{"model.recipe": ["post_ln", "pre_ln"], "layers": [6, 18]}`, side by side.

    config: a TOML file, or None for the embedded default, with `options` ({"train.steps": 500}) laid over it. A comparison that
    is in the folder already goes on, and is extended by further values. parallel, seconds: see `run_all`.
    """
    if isinstance(axes, Mapping):
        for name, values in axes.items():
            _check_list(values, f"the values of {name}")
    wanted = [Axis(name, tuple(values)) for name, values in axes.items()] if isinstance(axes, Mapping) else list(axes)
    comparison = Comparison.make_or_extend(Path(folder), None if config is None else Path(config), wanted, options)
    code = run_all(comparison, parallel, seconds)
    if code:
        raise Stopped(code - 128)
    write_documents(comparison)
    return comparison


def compare_runs(folders: Sequence[str | PathLike[str]], out: str | PathLike[str] | None = None) -> Comparison:
    """Runs that exist, by the options in which they differ; out: a folder that gets comparison.json and the page."""
    _check_list(folders, "the runs")
    comparison = Comparison.of_runs([Path(each) for each in folders], None if out is None else Path(out))
    if out is not None:
        write_documents(comparison)
    return comparison


def _check_list(given: Any, what: str) -> None:
    """Refuse one text where several are asked for: its letters would be taken for them."""
    if isinstance(given, str | bytes | PathLike) or not isinstance(given, Iterable):
        raise InputError(f"{what} are given as {shown(given)}", fix="give a list, of one where there is but one")
