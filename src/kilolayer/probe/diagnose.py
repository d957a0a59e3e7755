"""A diagnosis of a model, of a configuration before training, or of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kilolayer import config as configuration
from kilolayer.errors import InputError, shown
from kilolayer.evaluate.source_use import source_gain
from kilolayer.evaluate.stack_label import checks_of, dead_stacks
from kilolayer.files.paths import kind_of
from kilolayer.models.fit import expected_weights
from kilolayer.models.model import Model
from kilolayer.probe.accumulated import Change, change_over_checkpoints, change_over_steps
from kilolayer.probe.diagnosis import Diagnosis, Settings, measure
from kilolayer.probe.foreign import diagnose_foreign
from kilolayer.probe.propagation import Loss
from kilolayer.probe.subject import require_layers, starting_model, training_loss
from kilolayer.probe.trial import Trial
from kilolayer.probe.verdict import judge
from kilolayer.runs import checkpoint
from kilolayer.runs.chosen import Chosen
from kilolayer.runs.last_saved import all_deleted
from kilolayer.runs.metrics import read_metrics
from kilolayer.runs.run import Run, cache_folder, choose_device, prepare
from kilolayer.runs.start import start_of, started_config, vocabulary_of
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.task import Task
from kilolayer.torch_state import own_torch_state


class HasFolder(Protocol):
    """The part of a trained run that is needed here."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        ...


logger = logging.getLogger(__name__)


@own_torch_state("kl.diagnose")
def diagnose(
    source: nn.Module | Run | HasFolder | RunConfig | Path | str,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    settings: Settings | None = None,
    steps: int = 0,
    at: int | None = None,
    device: str = "auto",
) -> Diagnosis:
    """Measure on one batch what depth does to `source`, and suggest what to change.

    source: a model; a run, as `kl.load` returns it, or its folder, whose newest checkpoint is measured; or a configuration or
    its TOML file, whose model is measured at initialization. A model may also be one of torch or of Hugging Face's
    Transformers, adapted or not, whose layers are in a list; what goes on inside of its layers is then not measured.
    loss: a function that computes the loss of a batch from the model; required with a model, otherwise that of the task.
    settings: how the model will be trained; by default Adam with its usual settings.
    steps: for a configuration, train this many steps and measure how far they move the output.
    at: the step of the run's checkpoint.
    device: "auto" is the configuration's own, and for a run the GPU if there is one.

    The random state and the number of threads of torch are restored afterwards; it is refused while another thread trains,
    forecasts or diagnoses.
    """
    if isinstance(source, str | Path):
        source = _open(Path(source))
    elif not isinstance(source, nn.Module | Run | RunConfig):
        source = Run.open(_folder_of(source))
    if not isinstance(steps, int) or steps < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"steps is {shown(steps)}", fix="give the number of steps to train, or remove it")
    if isinstance(source, nn.Module):
        if not callable(loss) or steps or at is not None:
            fix = "give a function that computes it: kl.diagnose(model, lambda model: model(**batch).loss)"
            raise InputError("a model is diagnosed with a loss, at its current weights", fix=fix)
        if not isinstance(source, Model):
            return diagnose_foreign(source, loss, settings or Settings())
        return judge(measure(source, loss, settings or Settings()))
    if loss is not None or settings is not None:
        raise InputError("loss and settings are those of the run", fix="give them only with a model")
    require_layers(source.config if isinstance(source, Run) else source)
    if isinstance(source, Run):
        if steps:
            raise InputError("steps applies to a configuration: a run has its checkpoints", fix="remove steps")
        return _of_run(source, at, device)
    if at is not None:
        raise InputError("a configuration has no checkpoints", fix="remove at, or name a run")
    return _of_configuration(source, steps, device)


def _folder_of(source: object) -> Path:
    """The folder of a trained run."""
    folder = getattr(source, "folder", None)
    if not isinstance(folder, Path):
        fix = "give a model with a loss, a run or its folder, or a configuration's file"
        raise InputError(f"what is diagnosed is {shown(source)}", fix=fix)
    return folder


def _open(path: Path) -> Run | RunConfig:
    if kind_of(path) == "folder":
        return Run.open(path)
    return started_config(configuration.load(path), str(path))


def _of_configuration(config: RunConfig, steps: int, device: str) -> Diagnosis:
    target = config.train.device if device == "auto" else device
    choose_device(target, "train.device" if device == "auto" else "device")  # before any work
    task = prepare(config, cache_folder(), vocabulary_of(start_of(config), config))
    plain = {"precision": "fp32", "residual": "fp32", "recompute": "none", "eager": True, "device": target}
    config = task.resolve(config)
    trial = Trial(replace(config, train=replace(config.train, **plain)), task)
    loss = training_loss(task, config.train.seed, 1, of="total")
    found = measure(trial.model, loss, _settings(trial.config, 0))
    changes = tuple(change_over_steps(trial, loss, steps)) if steps else ()
    return judge(replace(found, changes=changes))


def _of_run(run: Run, at: int | None, device: str) -> Diagnosis:
    if (gone := all_deleted(run.checkpoints)) is not None:
        raise gone
    target = choose_device(device, "device")
    task = run.task(cache_folder())
    expected = expected_weights(run.config.model)
    paths = [path for path in checkpoint.steps(run.checkpoints) if checkpoint.find_fault(path, expected) is None]
    known = [checkpoint.step_of(path) for path in paths]
    if not known or (at is not None and at not in known):
        has = f"it has those of step {', '.join(map(str, known))}" if known else "train it first, or diagnose its configuration"
        what = "the run has no complete checkpoint" if at is None else f"the run has no complete checkpoint of step {at}"
        raise InputError(what, where=str(run.checkpoints), fix=has)
    step = known[-1] if at is None else at
    loss = training_loss(task, run.config.train.seed, 1, of="total")
    changes = tuple(_changes(run, task, loss, known, target))
    model = run.load_model(target, Chosen("asked for", [step], []))
    rows = [row for row in read_metrics(run.folder) if row["step"] <= step]
    settings, gain = _settings(run.config, step), source_gain(_late_validations(rows, run.config.train.steps))
    at_end = step >= run.config.train.steps or (step == known[-1] and kind_of(run.folder / "scores.json") == "file")
    checks = checks_of(row for row in rows if row["kind"] == "stacks") if at_end else {}
    found = measure(model, loss, settings, changes, tuple(dead_stacks(checks, run.config.train.lr)), gain)
    return judge(replace(found, epochs=next((row["epoch"] for row in reversed(rows) if "epoch" in row), None)))


def _changes(run: Run, task: Task, loss: Loss, steps: list[int], device: torch.device) -> list[Change]:
    """The change over the run's checkpoints; empty if the run that this one started from no longer exists."""
    try:
        start = starting_model(run.config, task, device)
    except InputError as error:
        logger.warning("the change since the start is left out, because the initial weights are not known: %s", error.what)
        return []
    return change_over_checkpoints(start, loss, _weights(run, task, steps))


def _weights(run: Run, task: Task, steps: list[int]) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
    for step in steps:
        yield step, run.weights(task.vocabulary, Chosen("asked for", [step], []))


def _late_validations(rows: Sequence[Mapping[str, Any]], steps: int) -> list[Mapping[str, Any]]:
    """Those of the second half of a run: in the first, a model has not had the time to learn to read its source."""
    return [row for row in rows if row["kind"] == "valid" and row["step"] >= steps / 2]


def _settings(config: RunConfig, step: int) -> Settings:
    train = config.train
    same = ("lr", "eps", "warmup_steps", "steps")
    return Settings(
        betas=(train.beta1, train.beta2),
        step=step,
        optimizer=train.rule.title,
        uses_eps=hasattr(train.rule, "eps"),
        **{name: getattr(train, name) for name in same},
    )
