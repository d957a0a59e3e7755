"""Comparisons from Python: `kl.run_comparison` and `kl.compare_runs`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

from kilolayer.compare.comparison import Comparison
from kilolayer.compare.documents import write_documents
from kilolayer.compare.grid import Axis
from kilolayer.compare.queue import run_all
from kilolayer.errors import OptionError, shown
from kilolayer.files.paths import as_path
from kilolayer.runs.config_source import plain_tables
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
    """Train every combination of values, `{"model.recipe": ["post_ln", "pre_ln"], "layers": [6, 18]}`, several runs at once.

    config: a TOML file, or None for the embedded default; `options` ({"train.steps": 500}) override its values. A comparison
    that is already in the folder is continued, and extended by new values. parallel, seconds: see `run_all`.
    """
    for name, most, kind in (("parallel", parallel, int), ("seconds", seconds, int | float)):
        if most is not None and not (isinstance(most, kind) and most > 0):
            fix = f"give a {'whole ' if kind is int else ''}number above 0, or None"
            raise OptionError(f"{name} is {shown(most)}", where="run_comparison", fix=fix)
    if not isinstance(options, Mapping | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(f"options is {shown(options)}", where="run_comparison", fix='give a dict: {"train.steps": 500}')
    path = None if config is None else as_path(config, "config")
    comparison = Comparison.make_or_extend(as_path(folder, "folder"), path, _listed(axes), plain_tables(options or {}))
    code = run_all(comparison, parallel, seconds)
    if code:
        raise Stopped(code - 128)
    write_documents(comparison)
    return comparison


def _listed(axes: Axes) -> list[Axis]:
    """The axes, with values as in TOML."""
    if not isinstance(axes, Mapping):
        if isinstance(axes, Sequence) and all(isinstance(axis, Axis) for axis in axes):  # pyright: ignore[reportUnnecessaryIsInstance]
            return list(axes)
        raise OptionError(f"axes is {shown(axes)}", where="run_comparison", fix='give a dict of lists: {"train.lr": [1e-3]}')
    for name, values in axes.items():
        if isinstance(values, str | Mapping) or not isinstance(values, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            fix = f"give a list of values, if only of one: [{values!r}]"
            raise OptionError(f"{name} is {shown(values)}", where="axes", fix=fix)
    return [Axis(name, tuple(plain_tables(list(values)))) for name, values in axes.items()]


def compare_runs(folders: Sequence[str | PathLike[str]], out: str | PathLike[str] | None = None) -> Comparison:
    """Compare existing runs by the options in which they differ; out: a folder for comparison.json and the page."""
    if isinstance(folders, str | PathLike):
        raise OptionError(
            f"folders is {shown(folders)}", where="compare_runs", fix='give a list: ["runs/first", "runs/second"]'
        )
    places = [as_path(each, "a run's folder") for each in folders]
    comparison = Comparison.of_runs(places, None if out is None else as_path(out, "out"))
    if out is not None:
        write_documents(comparison)
    return comparison
