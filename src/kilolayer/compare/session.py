"""Comparisons from Python: `kl.run_comparison` and `kl.compare_runs`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from kilolayer import hints
from kilolayer.compare.comparison import Comparison
from kilolayer.compare.documents import write_documents
from kilolayer.compare.grid import Axis
from kilolayer.compare.queue import run_all
from kilolayer.config import Table
from kilolayer.errors import OptionError, shown
from kilolayer.files.paths import as_path, kind_of
from kilolayer.runs.config_source import Source, plain_tables, read_source
from kilolayer.tasks import registry
from kilolayer.training.stop import Stopped

Axes = Mapping[str, Sequence[Any]] | Sequence[Axis]


def run_comparison(
    config: Source = None,
    axes: Axes | None = None,
    *,
    folder: str | PathLike[str] | None = None,
    parallel: int | None = None,
    seconds: float | None = None,
    **tables: Any,
) -> Comparison:
    """Train every combination of values, `{"model.recipe": ["post_ln", "pre_ln"], "layers": [6, 18]}`, several runs at once.

    config: as for `kl.train`: a TOML file, a dict of tables, a configuration, or None for the embedded default; or the folder
    of a comparison, which is continued.
    axes: the values of each option that varies. A comparison that is already in the folder is continued, and extended by them.
    tables: values that override the configuration of all runs, `train={"steps": 500}`.
    folder: by default runs/compare-NAME, after the file.
    parallel: the maximum number of runs at once; by default as many as memory and cores allow.
    seconds: after this time, the runs under way stop with a checkpoint, and the same call continues.

    Progress is printed to stderr. `print(comparison)` prints what `kilolayer compare` prints, a notebook also shows the plots
    of its page, and `comparison.rows()` returns one dict for each run.
    """
    for name, most, kind in (("parallel", parallel, int), ("seconds", seconds, int | float)):
        if most is not None and not (isinstance(most, kind) and most > 0):
            fix = f"give a {'whole ' if kind is int else ''}number above 0, or None"
            raise OptionError(f"{name} is {shown(most)}", where="run_comparison", fix=fix)
    comparison = _opened(config, axes, folder, plain_tables(tables))
    code = run_all(comparison, parallel, seconds)
    if code:
        raise Stopped(code - 128, f"continue with: {hints.call('compare', comparison.folder)}")
    write_documents(comparison)
    return comparison


def _opened(config: Source, axes: Axes | None, folder: str | PathLike[str] | None, over: Table) -> Comparison:
    """The comparison that is continued, or a new one."""
    if isinstance(config, str | PathLike) and kind_of(path := as_path(config, "config")) == "folder":
        if folder is not None or over:
            what = "a comparison that is continued has its own folder and configuration"
            raise OptionError(what, where="run_comparison", fix=f"remove {'the tables' if folder is None else 'folder'}")
        found = Comparison.open(path)
        if axes is not None:
            found.extend(_listed(axes))
        return found
    if axes is None:
        fix = 'give the values that differ: {"model.recipe": ["post_ln", "pre_ln"]}'
        raise OptionError("there is nothing to compare", where="run_comparison", fix=fix)
    listed, given = _listed(axes), read_source(config, over)
    return Comparison.make_or_extend(_folder(config, folder), None if config is None else given.tables, listed, given.over)


def _folder(config: Source, folder: str | PathLike[str] | None) -> Path:
    if folder is not None:
        return as_path(folder, "folder")
    if config is None or isinstance(config, str | PathLike):
        return Path("runs") / f"compare-{Path(config or registry.EMBEDDED).stem}"
    raise OptionError("no folder is given", where="run_comparison", fix='name one: folder="runs/compared"')


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
    paths = [as_path(each, "a run's folder") for each in folders]
    comparison = Comparison.of_runs(paths, None if out is None else as_path(out, "out"))
    if out is not None:
        write_documents(comparison)
    return comparison
