"""Resumes a run, with changed options if they break nothing, and beyond its end if it is given more steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kilolayer import hints
from kilolayer.config import Table, build, dump, merge, override
from kilolayer.errors import InputError, OptionError
from kilolayer.files.paths import kind_of, storable
from kilolayer.files.reading import read_bytes
from kilolayer.files.writing import move, write
from kilolayer.runs import checkpoint
from kilolayer.runs.changes import Change, changes_asked, changes_between, check_changes, saved_config
from kilolayer.runs.last_saved import all_deleted, last_saved
from kilolayer.runs.run import Run, resolved, validations_since_best
from kilolayer.tasks.config import RunConfig
from kilolayer.terminal import say

GIVEN = "in the options that are given"


@contextmanager
def resumed(run: Run, over: Table | RunConfig) -> Iterator[Run]:
    """The run with the options in the tables `over`, or with this whole configuration; this process must hold the lock.

    If resuming is refused before any step, for example because the data differ from what it was trained on, the run is left
    unchanged.
    """
    config, measured = read_bytes(run.folder / "config.toml"), _size(run.folder / "metrics.jsonl")
    gone, aside = _apply_options(run, over)
    try:
        yield gone
    except (InputError, OptionError):
        if _size(run.folder / "metrics.jsonl") == measured:
            _restore(run.folder, config, aside)
        raise


def _apply_options(run: Run, over: Table | RunConfig) -> tuple[Run, Path | None]:
    """The run with the options `over`, and where the scores of a finished run were moved; None: it had none.

    Changes that are not allowed raise, also those edited into config.toml. A finished run that is given more steps is no longer
    finished: its scores are moved to another name. config.toml is written last, so that a run that is killed before is
    unchanged.
    """
    aside: Path | None = None
    folder, config = run.folder, over if isinstance(over, RunConfig) else _overridden_config(run, over)
    checkpoint.recover(run.checkpoints)
    step, state = checkpoint.newest_state(run.checkpoints)
    begun = saved_config(state) or run.config
    typed = changes_between(run.config, config)
    check_changes(typed, GIVEN, str(folder))
    check_changes(changes_between(begun, run.config), str(folder / "config.toml"), str(folder))
    finished = kind_of(folder / "scores.json") is not None
    gone = all_deleted(run.checkpoints)
    if gone is not None and (typed or not finished):
        raise gone
    if config.train.steps < step:
        where = GIVEN if config.train.steps != run.config.train.steps else str(folder / "config.toml")
        raise InputError(
            f"train.steps is {config.train.steps:,}, but the run has already taken {step:,}",
            where=where,
            fix=f"set it to more than {step:,}",
        )
    waited = validations_since_best(state) >= config.train.patience > 0
    more = step < config.train.steps and not waited and gone is None
    if finished and typed and not more:
        raise _nothing_to_do(run, step, waited)
    if finished and more:
        # The step of the checkpoint that was scored, which may have been deleted since.
        ended = max(step, last_saved(run.checkpoints) or 0)
        aside = folder / f"scores.step-{ended:08d}.json"
        move(folder / "scores.json", aside)
        say(f"{folder} was finished at step {ended:,} and continues; its previous scores are kept in {aside.name}")
    if typed:
        write(folder / "config.toml", dump(config.table()))
    return replace(run, config=config), aside


def _restore(folder: Path, config: bytes, aside: Path | None) -> None:
    """Restore the configuration and the scores."""
    if read_bytes(folder / "config.toml") != config:
        write(folder / "config.toml", config)
    if aside is not None:
        move(aside, folder / "scores.json")
        say(f"{folder} is not continued: it stays finished")


def _size(path: Path) -> int:
    """The size of a file in bytes; 0 if there is none."""
    return path.stat().st_size if kind_of(path) == "file" else 0


def _overridden_config(run: Run, over: Table) -> RunConfig:
    """The configuration overridden by the tables, with absolute paths and everything resolved."""
    if not over:
        return run.config
    for path in ("train.epochs", "train.warmup_share"):
        if _option_value(over, path) is not None:
            check_changes([Change(path, None, _option_value(over, path))], GIVEN, str(run.folder))
    absolute: Table = {}
    for path in run.config.resume.files:
        section, _, name = path.partition(".")
        value = _option_value(over, path)
        if isinstance(value, str) and value != "none":
            absolute = merge(absolute, {section: {name: str(storable(Path(value)))}})
        elif isinstance(value, list) and all(isinstance(each, str) for each in value):
            absolute = merge(absolute, {section: {name: [str(storable(Path(each))) for each in value]}})
    try:
        return resolved(build(RunConfig, merge(override(RunConfig, run.config.table(), over), absolute)))
    except OptionError as error:
        # An option that may not change is the first to name, whatever it does not fit.
        check_changes(changes_asked(run.config, over), GIVEN, str(run.folder))
        raise error.at(GIVEN) from None


def _option_value(table: Table, path: str) -> Any:
    """The value of an option with one dot in its name; None if there is none."""
    section, _, name = path.partition(".")
    inner = table.get(section)
    return inner.get(name) if isinstance(inner, dict) else None


def _nothing_to_do(run: Run, step: int, waited: bool) -> InputError:
    if waited:
        return InputError(
            f"the run has stopped at step {step:,}: the {run.config.train.patience} validations after the best were no better",
            where=str(run.folder),
            fix=f"raise its patience: {hints.option('train.patience', 0)}, or more than {run.config.train.patience}",
        )
    return InputError(
        f"the run is finished at step {step:,}, and there is nothing left to do with these options",
        where=str(run.folder),
        fix=f"give it more steps: {hints.option('train.steps', 2 * step)}; or score something else: `{hints.verb('evaluate')}`",
    )
