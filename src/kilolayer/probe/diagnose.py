"""A diagnosis of a model, of a configuration before training, or of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kilolayer import config as configuration
from kilolayer.errors import InputError
from kilolayer.files.paths import kind_of
from kilolayer.models.model import Model
from kilolayer.probe.accumulated import change_over_checkpoints, change_over_steps
from kilolayer.probe.diagnosis import Death, Diagnosis, Settings, measure
from kilolayer.probe.propagation import Loss
from kilolayer.probe.subject import training_loss
from kilolayer.probe.verdict import judge
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.task import Task
from kilolayer.training import checkpoint
from kilolayer.training.chosen import Chosen
from kilolayer.training.metrics import read_metrics
from kilolayer.training.run import Run, cache_folder, in_steps, load_weights, prepare
from kilolayer.training.start import find_start, vocabulary_of
from kilolayer.training.trainer import Trainer


def diagnose(
    source: Model | Run | RunConfig | Path | str,
    loss: Loss | None = None,
    *,
    settings: Settings | None = None,
    steps: int = 0,
    at: int | None = None,
    device: str = "auto",
) -> Diagnosis:
    """What depth does to `source`, measured on one batch, and what to change.

    source: a model; a run or its folder, whose newest checkpoint is measured; or a configuration or its TOML file, whose model
    is measured as it starts. loss: of a batch, computed from the model; needed with a model, a task's else.
    settings: how a model is to be trained, Adam's usual ones else. steps: of a configuration, train so many and measure how far
    they move the output. at: the step of the run's checkpoint.
    """
    if isinstance(source, str | Path):
        source = _open(Path(source))
    if isinstance(source, Model):
        if loss is None or steps or at is not None:
            raise InputError("a model is diagnosed with a loss, at its present weights", fix="diagnose(model, loss)")
        return judge(measure(source, loss, settings or Settings()))
    if loss is not None or settings is not None:
        raise InputError("loss and settings are those of the run", fix="give them with a model alone")
    if isinstance(source, Run):
        if steps:
            raise InputError("steps are of a configuration: a run has its checkpoints", fix="remove steps")
        return _of_run(source, at, device)
    if at is not None:
        raise InputError("a configuration has no checkpoints", fix="remove at, or name a run")
    return _of_configuration(source, steps, device)


def _open(path: Path) -> Run | RunConfig:
    if kind_of(path) == "folder":
        return Run.open(path)
    table = configuration.load(path)
    return configuration.build(RunConfig, configuration.merge(find_start(table)[1], table))


def _of_configuration(config: RunConfig, steps: int, device: str) -> Diagnosis:
    start = None if config.train.start_from is None else Run.open(Path(config.train.start_from))
    task = prepare(config, cache_folder(), vocabulary_of(start, config))
    config = in_steps(task.resolve(config), task)
    config = replace(config, train=config.train.in_steps(0))
    with torch.random.fork_rng():
        trainer = _start(Run(Path(), config), task, device)
        loss = training_loss(task, config.train.seed, 1, of="total")
        found = measure(trainer.model, loss, _settings(config, 0))
        changes = tuple(change_over_steps(trainer, loss, steps)) if steps else ()
    return judge(replace(found, changes=changes))


def _of_run(run: Run, at: int | None, device: str) -> Diagnosis:
    task = run.task(cache_folder())
    paths = [path for path in checkpoint.steps(run.checkpoints) if checkpoint.find_fault(path) is None]
    known = [checkpoint.step_of(path) for path in paths]
    if not known or (at is not None and at not in known):
        has = f"it has those of step {', '.join(map(str, known))}" if known else "train it first, or diagnose its configuration"
        what = "the run has no whole checkpoint" if at is None else f"the run has no whole checkpoint of step {at}"
        raise InputError(what, where=str(run.checkpoints), fix=has)
    step = known[-1] if at is None else at
    with torch.random.fork_rng():
        trainer = _start(run, task, device)
        loss, model = training_loss(task, run.config.train.seed, 1, of="total"), trainer.model
        changes = tuple(change_over_checkpoints(model, loss, _weights(run, task, known)))
        load_weights(model, run.weights(task.vocabulary, Chosen("asked for", [step], [])), run.folder)
        found = measure(model, loss, _settings(run.config, step), changes, _deaths(run, step))
    return judge(found)


def _weights(run: Run, task: Task, steps: list[int]) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
    for step in steps:
        yield step, run.weights(task.vocabulary, Chosen("asked for", [step], []))


def _deaths(run: Run, step: int) -> tuple[Death, ...]:
    events = [row for row in read_metrics(run.folder) if row["kind"] == "event" and row["step"] <= step]
    return tuple(Death(row["dead"], int(row["step"]), str(row.get("text", ""))) for row in events if row.get("dead"))


def _start(run: Run, task: Task, device: str) -> Trainer:
    """The run before its first step, in fp32 and one batch a step's part: as training begins."""
    train = replace(run.config.train, precision="fp32", residual="fp32", recompute="none", eager=True, device=device, threads=0)
    trainer = Trainer(Run(run.folder, replace(run.config, train=train)), task)
    trainer.begin(None)
    return trainer


def _settings(config: RunConfig, step: int) -> Settings:
    train = config.train
    return Settings(train.lr, train.eps, train.warmup_steps, (train.beta1, train.beta2), step)
