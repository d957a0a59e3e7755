"""A comparison is a folder with what its runs share and what varies, the runs themselves, and their results.

FOLDER/  base.toml  comparison.toml  configs/NAME.toml  runs/NAME/  logs/NAME.txt  comparison.json  comparison.html

The runs are ordinary ones; only their own folders show which of them are finished.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kilolayer import config as configuration
from kilolayer import hints
from kilolayer.compare.flat_options import ALWAYS_NAMED, differing_options, flat_options
from kilolayer.compare.grid import (
    DEPTHS,
    LAYERS,
    RECIPE,
    Axis,
    Setting,
    apply_setting,
    axes_of,
    differing,
    effective,
    join_axes,
    name_of,
    nested,
    same,
    settings_of,
)
from kilolayer.compare.measure import measures_of
from kilolayer.compare.result import Member, Result, record_of, result_of
from kilolayer.config import Table, merge, override
from kilolayer.display import Displayed
from kilolayer.errors import InputError, KilolayerError, OptionError, shown
from kilolayer.files.paths import kind_of, resolve, storable
from kilolayer.files.reading import read_json
from kilolayer.files.writing import make_folder, write
from kilolayer.recipes.base import is_built_in
from kilolayer.report.record import read_record
from kilolayer.runs.lock import locked
from kilolayer.runs.run import check_new, choose_device
from kilolayer.runs.start import started_config
from kilolayer.runs.trackers import find_trackers
from kilolayer.tasks import registry
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.registry import Registration

MOST_RUNS = 10_000
"""The maximum number of runs in a comparison, as a guard against typing errors."""
LEFT_BY_A_KILLED_START = ("lock", "data", "base.toml")


@dataclass
class Comparison(Displayed):
    """Runs that differ in some options; `print` prints their table, as `kilolayer compare` does.

    base: the tables that they share; None for existing runs that are compared.
    started_in: the folder that relative paths in the base start from. named: the options whose values appear in the names of
    the runs: those given as axes, those in which runs differed when they were added, and always recipe, depth and seed. A run
    keeps its name when others are added.
    """

    _laid_out_by = "kilolayer.compare.parts"

    folder: Path
    members: list[Member]
    base: Table | None = None
    started_in: Path = field(default_factory=Path.cwd)
    named: list[str] = field(default_factory=list)

    @classmethod
    def make(
        cls,
        folder: Path,
        config: Path | Table | None,
        axes: Sequence[Axis] = (),
        options: Mapping[str, Any] | None = None,
        settings: Sequence[Mapping[str, Any]] | None = None,
    ) -> Comparison:
        """Create a comparison of every combination of the axes; config: a file, its tables, or None for the embedded default.

        options: values that override the configuration. settings: single runs, which need not form a grid, instead of axes. All
        are checked before anything is written.
        """
        folder = storable(folder)
        default, base = RunConfig.choose({}), base_of(folder, config, options)
        made = cls(folder, [], base)
        made._set_members([], axes, settings)
        _check_new(folder)
        if merge(base, default.embedded(folder / "data")) == base:
            default.write_embedded(folder / "data")
        write(folder / "base.toml", configuration.dump(base))
        made._write()
        return made

    @classmethod
    def open(cls, folder: Path) -> Comparison:
        """Open an existing comparison."""
        path = folder / "comparison.toml"
        if kind_of(path) != "file":
            made = f"name a folder that `{hints.verb('compare')}` created"
            raise InputError("this is not a comparison", where=str(folder), fix=made)
        folder = resolve(folder)
        table, base = configuration.load(path), configuration.load(folder / "base.toml")
        try:
            runs = {str(run["name"]): dict(run["options"]) for run in table.get("runs", [])}
            started_in = Path(table["started_in"])
            # Without this entry, all options appear in the names.
            named = list(map(str, table.get("named", dict.fromkeys(name for options in runs.values() for name in options))))
        except (KeyError, TypeError, ValueError):
            raise InputError(
                "the file does not hold a comparison", where=str(path), fix="start the comparison again in a new folder"
            ) from None
        if odd := [name for name in runs if name != Path(name).name or name in ("", ".", "..")]:
            raise InputError(
                f"{shown(odd[0])} is not a valid run name", where=str(path), fix="start the comparison again in a new folder"
            )
        axes_of(runs.values())  # raises if they are not options
        members = [Member(name, options, folder / "runs" / name) for name, options in runs.items()]
        return cls(folder, members, base, started_in, named)

    @classmethod
    def make_or_extend(
        cls,
        folder: Path,
        config: Path | Table | None,
        axes: Sequence[Axis] = (),
        options: Mapping[str, Any] | None = None,
        settings: Sequence[Mapping[str, Any]] | None = None,
    ) -> Comparison:
        """Like `make`, but extend an existing comparison with the same base, so that a command can be repeated."""
        shared = nested(options or {})
        for axis in axes:
            names = DEPTHS if axis.name == LAYERS else (axis.name,)
            if found := [name for name in names if _has(shared, name)]:
                raise OptionError(f"{found[0]} is both set for all runs and varied", fix="remove one of the two")
        if kind_of(folder / "comparison.toml") is None:
            return cls.make(folder, config, axes, options, settings)
        found = cls.open(folder)
        base = base_of(found.folder, config, options)
        if found.base != base and not any(map(record_of, found.members)):
            return cls._replace_unstarted(found.folder, base, axes, settings)
        if found.base != base:
            raise InputError(
                "the folder already holds a comparison of another configuration",
                where=str(folder),
                fix=f"{_another_folder()}, or continue that one: {hints.call('compare', folder)}",
            )
        if settings is None:
            found.extend(axes)
        else:
            found.add(settings)
        return found

    @classmethod
    def _replace_unstarted(
        cls, folder: Path, base: Table, axes: Sequence[Axis], settings: Sequence[Mapping[str, Any]] | None
    ) -> Comparison:
        """Replace a comparison none of whose runs has begun, for example because its configuration had a mistake."""
        made = cls(folder, [], base)
        made._set_members([], axes, settings)
        with locked(folder):
            for path in (folder / "configs").glob("*.toml"):
                path.unlink()
            write(folder / "base.toml", configuration.dump(base))
            made._write()
        return made

    @classmethod
    def of_runs(cls, folders: Sequence[Path], out: Path | None = None) -> Comparison:
        """A comparison of existing runs, by the options in which they differ; recipe, depth and seed are always included."""
        paths = list(dict.fromkeys(map(resolve, folders)))
        configs = [read_record(path).config for path in paths]  # raises if one is not a run
        if len(paths) < 2:
            where = str(paths[0]) if paths else ""
            raise OptionError(
                "there is only one run, and nothing to compare it with",
                where=where,
                fix="name more runs, or a comparison's folder",
            )
        if out is not None and kind_of(out / "comparison.toml") is not None:
            another = f"choose another: {hints.argument('out', 'FOLDER')}"
            raise OptionError("the folder already holds a comparison", where=str(out), fix=another)
        members: list[Member] = []
        for path, options in zip(paths, differing_options(configs), strict=True):
            members.append(Member(_unused(path.name, members), options, path))
        if any(same(a.options, b.options) for a in members for b in members if a is not b):
            members = [Member(each.name, {"run": each.name, **each.options}, each.folder) for each in members]
        return cls(resolve(out) if out is not None else Path.cwd(), members)

    @property
    def axes(self) -> list[Axis]:
        """The options that vary, with all values that occur."""
        return axes_of(member.options for member in self.members)

    @property
    def task(self) -> Registration | None:
        """The registration of the runs' task; None if they have several tasks, or one that is not known here."""
        tables = [self.base] if self.base is not None else [read_record(member.folder).config for member in self.members]
        names = {str(table.get("task", registry.DEFAULT)) for table in tables}
        try:
            return registry.get(names.pop()) if len(names) == 1 else None
        except KilolayerError:
            return None

    def extend(self, axes: Sequence[Axis]) -> None:
        """Add every combination with the new values. The runs so far have the base's value for an option that did not vary."""
        known = {axis.name for axis in self.axes}
        fresh = [axis.name for axis in axes if axis.name not in known]
        before = [
            Member(each.name, effective({**each.options, **self._present(each, fresh)}), each.folder) for each in self.members
        ]
        joined = join_axes([*axes_of(each.options for each in before), *axes])
        self._set_members(before, axes, _all_of(joined))
        self._write()

    def add(self, settings: Iterable[Mapping[str, Any]]) -> None:
        """Add single runs, which need not form a grid; existing ones are kept."""
        self._set_members(self.members, (), list(settings))
        self._write()

    def table_of(self, member: Member) -> Table:
        """The configuration of a run, as tables."""
        assert self.base is not None
        return apply_setting(self.base, member.options)

    def config_of(self, member: Member) -> RunConfig:
        """The configuration of a run, checked; raises if it cannot be trained."""
        table = self.table_of(member)
        try:
            config = started_config(table)
            _check_importable(table, config)
            choose_device(config.train.device)
            find_trackers(config.train)
        except KilolayerError as error:
            raise error.at(f"in the run {member.name}") from None
        return config

    def config_path(self, member: Member) -> Path:
        """The file with a run's configuration, written now: base.toml may have been corrected since the run was refused."""
        path = self.folder / "configs" / f"{member.name}.toml"
        make_folder(path.parent)
        write(path, configuration.dump(self.table_of(member)))
        return path

    def log_path(self, member: Member) -> Path:
        """The file for the output of a run's process."""
        return self.folder / "logs" / f"{member.name}.txt"

    def results(self) -> list[Result]:
        """The current results of all runs, in the order in which they were added.

        Each has a value for every option that varies: that of the run's configuration if the run was added without one.
        """
        failures, names = self.failures(), [axis.name for axis in self.axes]
        completed = [Member(each.name, self._completed(each, names), each.folder) for each in self.members]
        return [result_of(member, failures.get(member.name)) for member in completed]

    def result_of(self, member: Member) -> Result:
        """The current result of one run."""
        return result_of(member, self.failures().get(member.name))

    def rows(self) -> list[dict[str, Any]]:
        """The current results as one plain dict for each run, ready for `pandas.DataFrame(comparison.rows())`.

        A row has the run's name, its options, its outcome and the step that it has reached, and every measure of the table by
        its title, None if the run does not have it.
        """
        results = self.results()
        _, measures = measures_of(results, None if self.task is None else self.task.headline)
        return [
            {
                "run": result.name,
                **result.options,
                "outcome": result.outcome.kind,
                "step": result.outcome.step,
                "seconds": None if result.seconds is None or math.isnan(result.seconds) else result.seconds,
                **{each.title: None if math.isnan(value := each.of(result)) else value for each in measures},
            }
            for result in results
        ]

    def failures(self) -> dict[str, str]:
        """Why processes of runs have failed, by the names of the runs."""
        path = self.folder / "failures.json"
        if self.base is None or kind_of(path) is None:
            return {}
        found = read_json(path)
        return {str(name): str(text) for name, text in found.items()} if isinstance(found, dict) else {}

    def record_failure(self, member: Member, text: str | None) -> None:
        """Record why a run has failed; None: it is tried again."""
        failures = {name: each for name, each in self.failures().items() if name != member.name}
        failures |= {} if text is None else {member.name: text}
        if failures != self.failures():
            write(self.folder / "failures.json", json.dumps(failures, indent=1))

    def _set_members(self, before: list[Member], axes: Sequence[Axis], settings: Sequence[Mapping[str, Any]] | None) -> None:
        """Check new settings (None: all combinations of the axes) and set the members to `before` plus these."""
        wanted = _all_of(join_axes(axes)) if settings is None else list(settings)
        differ = differing([*(member.options for member in before), *wanted])
        named = list(dict.fromkeys([*self.named, *ALWAYS_NAMED, *(axis.name for axis in axes), *differ]))
        members = list(before)
        for setting in map(effective, wanted):
            if not any(same(setting, effective(member.options)) for member in members):
                name = _unused(name_of(setting, named), members)
                members.append(Member(name, setting, self.folder / "runs" / name))
                if len(members) > MOST_RUNS:
                    raise _too_many()
                self.config_of(members[-1])
        self.members, self.named = members, named

    def _write(self) -> None:
        runs = [{"name": member.name, "options": member.options} for member in self.members]
        table = {"started_in": str(self.started_in), "named": self.named, "runs": runs}
        write(self.folder / "comparison.toml", configuration.dump(table))

    def _completed(self, member: Member, names: Sequence[str]) -> Setting:
        """The run's options, with a value for each of `names`; "none" if its configuration has none, or cannot be read."""
        missing = [name for name in names if name not in member.options]
        present: Setting = {}
        if missing:
            with suppress(KilolayerError):  # the run that this one started from may be gone
                present = self._present(member, missing)
        return {**member.options, **dict.fromkeys(missing, "none"), **present}

    def _present(self, member: Member, names: Sequence[str]) -> Setting:
        """The values of options that do not vary in a run; one that the run's recipe does not have is left out."""
        try:
            config = started_config(self.table_of(member))
        except KilolayerError as error:
            raise error.at(f"in the run {member.name} of {self.folder}") from None
        if config.own_model is not None:
            own, depths = {}, {}
        else:
            own = {f"{RECIPE}.{name}": value for name, value in config.model.recipe.options().items()}
            depths = {name: getattr(config.model, name.rpartition(".")[2]) for name in DEPTHS}
        typed = {name: "none" if depth is None else depth for name, depth in depths.items()}
        values = flat_options(config.table()) | typed | own
        return {name: values.get(name, "none") for name in names if name in values or not name.startswith(f"{RECIPE}.")}


def base_of(folder: Path, config: Path | Table | None, options: Mapping[str, Any] | None = None) -> Table:
    """The tables that all runs share; the data of the embedded default are in the comparison's own folder."""
    below = config if isinstance(config, dict) else configuration.load(config or registry.EMBEDDED)
    if config is None:
        below = merge(below, RunConfig.choose({}).embedded(folder / "data"))
    return override(RunConfig, below, nested(options or {}))


def _all_of(axes: Sequence[Axis]) -> list[Setting]:
    """Every combination of values; too many are refused before they are listed, which would take minutes."""
    if math.prod(len(axis.values) for axis in axes) > MOST_RUNS:
        raise _too_many()
    return settings_of(axes)


def _too_many() -> OptionError:
    return OptionError(f"more than {MOST_RUNS:,} runs", fix="compare fewer values")


def _check_importable(table: Table, config: RunConfig) -> None:
    """Raise if a recipe or task is known to this process only: each run is a process of its own."""
    recipe, task = table.get("model", {}).get("recipe"), table.get("task", registry.DEFAULT)
    kinds = [("task", task, None if registry.is_built_in(registry.get(task)) else registry.get(task).task)]
    if config.own_model is None and not is_built_in(cls := type(config.model.recipe)):
        name = recipe.get("name") if isinstance(recipe, Mapping) else recipe
        kinds.append(("recipe", name, f"{cls.__module__}:{cls.__qualname__}"))
    for kind, name, path in kinds:
        if path is None or not isinstance(name, str) or (":" in name and not name.startswith("__main__:")):
            continue
        here = path.startswith("__main__:") or "<locals>" in path
        fix = f"write it into a file on the Python path, and name it my_module:{path.rpartition('.')[2].rpartition(':')[2]}"
        raise OptionError(
            f"the runs of a comparison are processes of their own, which do not know the {kind} {shown(name)}",
            where=kind,
            fix=fix if here else f'name it by its module and class: "{path}"',
        )


def _has(table: Mapping[str, Any], name: str) -> bool:
    """Whether a table sets the option with this dotted name."""
    key, _, rest = name.partition(".")
    if key not in table or not rest:
        return key in table
    return isinstance(table[key], Mapping) and _has(table[key], rest)


def _unused(name: str, members: Iterable[Member]) -> str:
    """The name, with a number appended if another run has it."""
    taken = {member.name for member in members}
    return next(each for count in range(1, len(taken) + 2) if (each := name if count == 1 else f"{name}-{count}") not in taken)


def _check_new(folder: Path) -> None:
    """Raise if the folder is not empty, except for what a killed start left behind."""
    if kind_of(folder) == "folder":
        names = [path.name for path in folder.iterdir()]
        if names and all(name in LEFT_BY_A_KILLED_START or name.endswith(".part") for name in names):
            return
    try:
        check_new(folder)
    except InputError as error:
        what = error.what.replace("the run folder", "the folder")
        raise InputError(what, where=error.where, fix=_another_folder()) from None


def _another_folder() -> str:
    return f"choose another: {hints.argument('out' if hints.in_shell() else 'folder', 'runs/NAME')}"
