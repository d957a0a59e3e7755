"""How a run begins: created in a new folder or opened in an existing one, and locked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kilolayer import hints
from kilolayer.config import RawConfig, Table
from kilolayer.data.tokenizer import DEFAULT_SIZE, TokenizerConfig
from kilolayer.errors import InputError, OptionError
from kilolayer.files.paths import resolve
from kilolayer.models.build import build_model
from kilolayer.models.regrid import regridded
from kilolayer.parallel.processes import Processes
from kilolayer.runs.changes import changes_between, check_changes
from kilolayer.runs.division import check_processes
from kilolayer.runs.last_saved import all_deleted
from kilolayer.runs.lock import locked
from kilolayer.runs.origins import Origin
from kilolayer.runs.progress import Progress
from kilolayer.runs.resume import GIVEN, resumed
from kilolayer.runs.run import (
    Run,
    cache_folder,
    check_fit,
    check_new,
    choose_device,
    delete_run,
    in_steps,
    is_run,
    prepare,
    resolved,
)
from kilolayer.runs.start import NOTE, cpu_model, other_vocabulary, read_started, vocabulary_of
from kilolayer.runs.trackers import find_trackers
from kilolayer.tasks.config import RunConfig, part_of
from kilolayer.tasks.task import Task, digest_of
from kilolayer.terminal import say


@contextmanager
def old_run(folder: Path, over: Table | None = None) -> Iterator[Run]:
    """Open an existing run and lock its folder; over: options that it is resumed with."""
    opened = Run.open(folder)
    with locked(folder), resumed(opened, over or {}) as run:
        yield run


def _vocabulary_notes(asked: RunConfig, config: RunConfig) -> list[str]:
    """That a text was too small for the default vocabulary, if it was."""
    before, after = (getattr(each, "tokenizer", None) for each in (asked, config))
    if not isinstance(before, TokenizerConfig) or not isinstance(after, TokenizerConfig):
        return []
    if before.vocab_size is not None or after.size >= DEFAULT_SIZE:
        return []
    return [
        f"[tokenizer] gives no vocab_size, and the training text has too few words for {DEFAULT_SIZE:,}: it is {after.size:,}"
    ]


@contextmanager
def new_run(
    folder: Path, given: RawConfig, processes: Processes, *, is_embedded: bool = False, overwrite: bool = False
) -> Iterator[Run]:
    """Create a run in a new, locked folder. Everything that can be refused is refused here, before any work.

    An error that is found later, but before the first step, leaves no run behind, so that the same command can be repeated.
    is_embedded: the run trains on the embedded data, which are written into its folder. overwrite: a run that is already in
    the folder is deleted, once the new one has been prepared.
    """
    config, start = _read(folder, given, is_embedded)
    _check_means(config, processes)
    check_new(folder, overwrite=overwrite)
    if overwrite and start is not None and resolve(start.folder) == resolve(folder):
        fix = f"choose another folder: {hints.argument('run', 'runs/NAME')}"
        raise OptionError("a run cannot overwrite the one that it starts from", where=str(folder), fix=fix)
    with locked(folder):
        asked = config
        config, task = _prepared(folder, config, start, processes, is_embedded)
        if overwrite:
            delete_run(folder)
        notes = [*([NOTE] if start is None and cpu_model(given.merged) else []), *_vocabulary_notes(asked, config)]
        run = Run.create(folder, config, task.vocabulary, "\n# ".join(notes))
        for note in notes:
            Progress(folder / "log.txt", 0, 0).say(note)
        try:
            yield run
        except (InputError, OptionError):
            if not run.has_begun:
                run.undo_creation()
            raise


@contextmanager
def same_run(folder: Path, given: RawConfig, processes: Processes, *, is_embedded: bool = False) -> Iterator[Run]:
    """Open and lock the run in a folder if it holds one, else create it; the arguments are those of `new_run`.

    An existing run is resumed with the options that are given. One that may not change in a run that has begun is refused. What
    was converted to steps when it was created stays so: a longer run does not warm up anew.
    """
    if not is_run(folder):
        with new_run(folder, given, processes, is_embedded=is_embedded) as run:
            yield run
        return
    opened = Run.open(folder)
    config, start = _read(folder, given, is_embedded)
    _check_means(config, processes)
    with locked(folder):
        config = resolved(_prepared(folder, config, start, processes, is_embedded)[0])
        config = replace(config, train=replace(config.train, **_converted(opened.config, given)))
        anew = f"leave it as it was, or train the run anew with {hints.flag('overwrite')}"
        check_changes(changes_between(opened.config, config), GIVEN, str(folder), anew)
        with resumed(opened, config) as run:
            yield run


def _converted(config: RunConfig, given: RawConfig) -> Table:
    """The options of training whose default depends on the length of a run, as the run has them, unless others are given."""
    train = part_of(given.merged, "train")
    kept = ["layers_every"] if train.get("layers_every", "auto") == "auto" else []
    if all(train.get(name, "none") == "none" for name in ("warmup_steps", "warmup_share")):
        kept.append("warmup_steps")
    return {name: getattr(config.train, name) for name in kept}


def _read(folder: Path, given: RawConfig, is_embedded: bool) -> tuple[RunConfig, Origin | None]:
    return read_started(given, RunConfig.choose({}).embedded(folder / "data") if is_embedded else None)


def _prepared(
    folder: Path, config: RunConfig, start: Origin | None, processes: Processes, is_embedded: bool
) -> tuple[RunConfig, Task]:
    """The complete configuration of a run, and its data, all of which is read; this process holds the folder's lock."""
    if is_embedded:
        type(config).write_embedded(folder / "data")
    task = prepare(config, cache_folder(), vocabulary_of(start, config))
    config = task.resolve(config)
    task.training_batches(config.train.seed)  # reads all training text before config.toml makes the folder a run
    config = in_steps(config, task, processes.size)
    if start is not None:
        _check_start(start, task, config)
        config = replace(config, train=replace(config.train, start_from=str(start.folder)))
    return config, task


def data_of(run: Run, processes: Processes) -> Task | None:
    """The data that the run trains on; None if it is finished."""
    if (run.folder / "scores.json").exists():
        if processes.first:
            gone = all_deleted(run.checkpoints)
            longer = f"{hints.option('train.steps', 2 * run.config.train.steps)} trains it longer"
            anew = f"{hints.option('train.start_from', run.folder)} starts a new run from its weights"
            what = f"there is nothing to do: {longer}, and {anew}" if gone is None else f"and cannot go on: {gone.what}"
            say(f"{run.folder} is finished, {what}")
        return None
    _check_means(run.config, processes)
    return run.task(cache_folder())


def _check_start(start: Origin, task: Task, config: RunConfig) -> None:
    """Raise if the tokens or the model differ from those of the start."""
    known = start.vocabulary()
    if None not in (known, task.vocabulary) and digest_of(known) != digest_of(task.vocabulary):
        raise other_vocabulary(start)
    there, here = (0 if each.moe is None else each.moe.experts for each in (start.model, config.model))
    if there != here:
        raise InputError(
            f"the run to start from has {there or 'no'} experts per layer, but this one has {here or 'none'}",
            where=str(start.folder),
            fix=f"set model.moe.experts to {there}" if there else "remove model.moe: a dense model cannot be made sparse",
        )
    theirs, ours = (build_model(each, device="meta", seed=0).state_dict() for each in (start.model, config.model))
    check_fit(ours, task.adopt(regridded(theirs, start.model, config.model), ours), start.folder)


def _check_means(config: RunConfig, processes: Processes) -> None:
    """Raise if a device for each process or a package is missing, or if these processes cannot do what is configured."""
    processes.check(choose_device(config.train.device))
    find_trackers(config.train)
    if config.train.shard != "none":
        check_processes(config.model, processes, config.train.shard_unit)
    if processes.group is not None and config.model.moe is not None and config.train.shard != "full":
        processes.group.part(config.model.moe.experts)
    if processes.group is not None and (config.model.moe is not None or config.train.shard != "none"):
        config.check_sharing()
