"""The training loop: what happens in a run, in order."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor

from kilolayer.data.tokenizer import PAD
from kilolayer.errors import InputError
from kilolayer.moe.layer import freeze_experts
from kilolayer.parallel.processes import Processes
from kilolayer.speed.recorder import Recorder
from kilolayer.tasks.task import Batch, Task, Validation
from kilolayer.training import checkpoint
from kilolayer.training.checkpoint import Checkpoint
from kilolayer.training.guard import Guard
from kilolayer.training.keeping import Inspector
from kilolayer.training.metrics import Metrics, Unwritten
from kilolayer.training.norms import LayerNorms
from kilolayer.training.optimizer import Optimizer
from kilolayer.training.placement import Placement
from kilolayer.training.progress import Progress, Silence
from kilolayer.training.routing_meter import RoutingMeter
from kilolayer.training.run import Run, check_vocabulary, choose_device
from kilolayer.training.saved_state import fitted, form_of, regular_before
from kilolayer.training.saver import Saver
from kilolayer.training.schedule import learning_rate
from kilolayer.training.step import Stepper, StepResult
from kilolayer.training.stop import STEP_SECONDS, Stop, Stopped, catching

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
RESIDUALS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Best:
    """The best validation so far, `waited` validations ago; value: its quality."""

    value: float | None = None
    step: int | None = None
    waited: int = 0

    def update(self, quality: float, step: int) -> bool:
        """Note a validation; True where it is the best."""
        value = -math.inf if math.isnan(quality) else quality
        if self.value is None or value > self.value:
            self.value, self.step, self.waited = value, step, 0
            return True
        self.waited += 1
        return False


@dataclass
class Window:
    """Sums since the last line of metrics; a skipped step adds to `skipped` and `seconds` alone."""

    loss: float = 0.0
    nll: float = 0.0
    grad_norm: float = 0.0
    dense_norm: float = 0.0
    expert_norm: float = 0.0
    tokens: int = 0
    steps: int = 0
    clipped: int = 0
    skipped: int = 0
    seconds: float = 0.0

    def add(self, result: StepResult, seconds: float) -> None:
        self.seconds += seconds
        if result.fault is not None:
            self.skipped += 1
            return
        self.loss += result.loss * result.tokens
        self.nll += result.nll * result.tokens
        self.grad_norm += result.gradient_norm
        self.dense_norm += result.dense_norm
        self.expert_norm += result.expert_norm
        self.tokens += result.tokens
        self.steps += 1
        self.clipped += result.clipped

    def summary(self) -> dict[str, float]:
        tokens, steps = self.tokens or math.nan, self.steps or math.nan
        return {
            "loss": self.loss / tokens,
            "nll": self.nll / tokens,
            "grad_norm": self.grad_norm / steps,
            "tokens_per_second": self.tokens / self.seconds,
            "clipped": self.clipped,
            "skipped": self.skipped,
        }

    def parts(self) -> dict[str, float]:
        """The gradient's norm without weights: of experts, and of all else."""
        steps = self.steps or math.nan
        return {"dense_norm": self.dense_norm / steps, "expert_norm": self.expert_norm / steps, "clipped": self.clipped}


class Trainer:
    """A run in motion. Everything that a checkpoint must hold is listed in `state` and `restore`, side by side.

    Of several processes each has a trainer of its own, and all have the same state but for their noise.
    """

    def __init__(self, run: Run, task: Task, processes: Processes | None = None) -> None:
        config = run.config.train
        self.run, self.task, self.config = run, task, config
        self.processes = processes or Processes()
        if config.threads:
            torch.set_num_threads(config.threads)
        self.device = self.processes.place(choose_device(config.device))
        torch.manual_seed(config.seed)
        self.placement = Placement(run.config.model, self.processes, self.device, config.seed)
        self.model = self.placement.model.train()
        if config.freeze == "experts":
            freeze_experts(self.model)
        self.routing = None if self.model.config.moe is None else RoutingMeter(self.model, self.device)
        self.guard = Guard(scaled=config.precision == "fp16")
        with self.processes.in_turn():
            self.batches = task.training_batches(config.seed)
        self.best = Best()
        self.window = Window()
        self.step = 0
        self.validated = 0
        self.saved: tuple[int, bool] | None = None
        """The step of the last checkpoint, and whether it is on the schedule."""
        self.regular: int | None = None
        """The step of the last checkpoint on the schedule."""
        self.seconds = 0.0

    def begin(self, saved: Checkpoint | None) -> None:
        """Start from the model as it was built, or go on from a checkpoint; then lower the precision of its products."""
        if saved is None and self.config.start_from is not None:
            other = Run.open(Path(self.config.start_from), self.run.config.task)
            self.placement.load(other.weights(self.task.vocabulary), other.folder)
        elif saved is None:
            self.calibrate()
        else:
            path = checkpoint.path_of(self.run.checkpoints, saved.step) / "state.json"
            check_vocabulary(
                fitted(saved.state, {"vocabulary": str}, path)["vocabulary"], self.task.vocabulary, self.run.folder
            )
            self.placement.load(saved.model, self.run.folder)
        self.placement.make_equal()
        dtype = DTYPES.get(self.config.precision)
        precise = {} if dtype is None else self.model.lower(dtype, RESIDUALS[self.config.residual])
        self.frozen = {
            name: precise[weight].cpu()
            for name, weight in self.model.named_parameters()
            if weight in precise and not weight.requires_grad
        }
        sums = self.config.accumulate * self.processes.size > 1 or self.device.type == "cpu"
        self.optimizer = Optimizer(self.model, self.config, precise or None, sums=sums)
        if saved is not None:
            self.restore(saved)

    def state(self) -> Checkpoint:
        """All that a resumed run needs to go on as if it had not stopped."""
        moments = self.placement.full_state(self.optimizer.tensors())
        weights = self.placement.full_state(self.model.state_dict() | self.frozen | self.optimizer.precise())
        return Checkpoint(self.step, weights, moments | self.random_state(), self.values())

    def values(self) -> dict[str, Any]:
        """The part of the state that is not in tensors."""
        return {
            "guard": self.guard.state(),
            "batches": self.batches.state(),
            "best": asdict(self.best),
            "validated": self.validated,
            "window": asdict(self.window),
            "routing": None if self.routing is None else self.routing.state(),
            "seconds": self.seconds,
            "vocabulary": self.task.vocabulary.digest,
        }

    def random_state(self) -> dict[str, Tensor]:
        """Of the generators that training draws from."""
        found = {"random.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            found["random.cuda"] = torch.cuda.get_rng_state(self.device)
        return found

    def set_random_state(self, found: Mapping[str, Tensor]) -> None:
        """Draw again what was drawn after `random_state`."""
        torch.set_rng_state(found["random.cpu"])
        if (cuda := found.get("random.cuda")) is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(cuda, self.device)

    def restore(self, saved: Checkpoint) -> None:
        """Put back what `state` gave, but for the weights, which `begin` loads."""
        path = checkpoint.path_of(self.run.checkpoints, saved.step)
        form = form_of(self.values()) | {"best": get_type_hints(Best), "window": get_type_hints(Window)}
        values = fitted({"validated": saved.step} | saved.state, form, path / "state.json")
        moments = {name: tensor for name, tensor in saved.optimizer.items() if not name.startswith("random.")}
        self.optimizer.load(self.placement.own_state(moments), path / "optimizer.safetensors")
        self._restore_random(saved.optimizer, path / "optimizer.safetensors")
        self.guard.load_state(values["guard"])
        self.batches.load_state(values["batches"])
        self.best = Best(**values["best"])
        self.validated = int(values["validated"])
        self.window = Window(**values["window"])
        if self.routing is not None:
            self.routing.load_state(values["routing"])
        self.step, self.seconds = saved.step, float(values["seconds"])
        scheduled = saved.state.get("scheduled") is not False
        self.saved = saved.step, scheduled
        self.regular = saved.step if scheduled else regular_before(saved.state, path / "state.json")

    def _restore_random(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        # A run may go on where there is a GPU, or is none, unlike before.
        ours = {name: tensor for name, tensor in self.random_state().items() if name in tensors or name == "random.cpu"}
        checkpoint.check_alike({name: tensors[name] for name in ours if name in tensors}, ours, path)
        try:
            self.set_random_state(tensors)
        except RuntimeError as error:
            raise InputError(f"its random state is none: {error}", where=str(path), fix="use another checkpoint") from None

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train: all steps are taken, or it no longer gets better."""
        patience = self.config.patience
        return self.step >= self.config.steps or bool(patience and self.best.waited >= patience)

    @property
    def validation_due(self) -> bool:
        """Whether this step has a validation that was not made yet, or was ended by a signal."""
        scheduled = self.step > 0 and (self.step % self.config.valid_every == 0 or self.step == self.config.steps)
        return scheduled and self.validated != self.step

    def take_batches(self) -> list[Batch]:
        """This process's share of the batches of a step: of n processes, the r-th takes those at r, r + n, ..."""
        rank, size = self.processes.rank, self.processes.size
        taken: list[Batch] = []
        for place in range(self.config.accumulate * size):
            if place % size == rank:
                taken.append(next(self.batches))
            else:
                self.batches.skip()
        return taken

    def calibrate(self) -> None:
        """Set the residual scales of a recipe that takes them from data; only before the first step."""
        if self.model.config.recipe.calibration() is None:
            return
        position = self.batches.state()
        *inputs, labels = next(self.batches).parts
        self.batches.load_state(position)
        real = labels[:, 0] != PAD  # rows that only fill up a batch have nothing to read
        self.placement.calibrate(tuple(each[real].to(self.device) for each in inputs))


def train(run: Run, task: Task, resume: bool = False, processes: Processes | None = None, stop: Stop | None = None) -> int:
    """Train until the end, until it no longer gets better, or until a signal; return the exit code.

    Called by each of several processes; the first alone writes files and the log. stop: of who handles the signals already.
    A signal that comes before training has begun raises `Stopped`.
    """
    processes = processes or Processes()
    with (
        catching() if stop is None else nullcontext(stop) as stop,
        stop.at_next_step() if processes.size > 1 else nullcontext(),
    ):
        trainer = Trainer(run, task, processes)
        inspector = Inspector()
        newest = _newest(run, processes, inspector) if resume else None
        trainer.begin(None if newest is None else checkpoint.load(newest, find=inspector.find_fault))
        metrics = Unwritten()
        if processes.first:
            metrics = Metrics(run.folder, trainer.step, trainer.config.tensorboard, trainer.validated)
        kind = Progress if processes.first else Silence
        progress = kind(run.folder / "log.txt", trainer.config.steps, trainer.step)
        _introduce(trainer, progress)
        if resume and newest is None:
            progress.say("there is no whole checkpoint: the run starts from the beginning")
        try:
            with stop.at_next_step(), Saver(run.checkpoints, trainer.config.keep, inspector) as saver:
                processes.step = trainer.step
                with processes.watched(trainer.config.timeout):
                    _loop(trainer, metrics, progress, stop, saver)
                if stop.signal:
                    progress.say(f"stopping: the checkpoint of step {trainer.step} is being written")
                _save(trainer, saver, scheduled=trainer.finished and not trainer.validation_due)
        finally:
            progress.close()
            metrics.close()
        stopped = processes.largest(stop.signal)
    if stopped:
        progress.say(f"stopped by a signal at step {trainer.step}; go on with: kilolayer train --resume {run.folder}")
        return 128 + stopped
    return 0


def _newest(run: Run, processes: Processes, inspector: Inspector) -> Path | None:
    """The checkpoint to go on from: what the first process finds."""
    found = None
    if processes.first:
        checkpoint.recover(run.checkpoints)
        found = checkpoint.newest(run.checkpoints, inspector.find_fault)
    step = processes.of_first(-1 if found is None else checkpoint.step_of(found))
    return None if step < 0 else checkpoint.path_of(run.checkpoints, int(step))


def _loop(trainer: Trainer, metrics: Metrics, progress: Progress, stop: Stop, saver: Saver) -> None:
    config = trainer.config
    stepper = Stepper(
        trainer.model,
        trainer.optimizer,
        config,
        trainer.guard,
        trainer.device,
        progress.say,
        trainer.routing,
        trainer.processes,
    )
    validation = stepper.recorder.beside("validation runs")
    # One that a signal has ended before the run was resumed.
    _validate_and_save(trainer, stepper, metrics, progress, validation, stop, saver)
    while trainer.step < config.steps and not trainer.processes.largest(stop.signal):
        if config.patience and trainer.best.waited >= config.patience:
            progress.say(f"stopped at step {trainer.step}: no better validation since step {trainer.best.step}")
            return
        step = trainer.step + 1
        lr = learning_rate(config, step)
        norms = LayerNorms() if config.measures_layers(step) else None
        trainer.processes.step = step
        trainer.processes.seed_noise(config.seed, step)
        started = time.monotonic()
        result = _take_step(trainer, stepper, lr, norms, stop)
        if result is None:
            progress.say(f"step {step} did not end within {STEP_SECONDS:.0f} seconds after the signal: it is abandoned")
            return
        seconds = time.monotonic() - started
        trainer.step = step
        trainer.seconds += seconds
        trainer.window.add(result, seconds)
        if result.fault is None:
            trainer.guard.accept()
            if norms is not None:
                metrics.write("layers", step, **norms.rounded())
        else:
            text = trainer.guard.skip(step, result.fault)
            metrics.write("event", step, text=text)
            progress.say(text)
            trainer.guard.check(step)
        if step % config.log_every == 0 or step == config.steps:
            _log(trainer, lr, metrics, progress)
        else:
            progress.refresh(step, lambda: _shown(trainer.window.summary()))
        _validate_and_save(trainer, stepper, metrics, progress, validation, stop, saver)
        saver.check()


def _take_step(trainer: Trainer, stepper: Stepper, lr: float, norms: LayerNorms | None, stop: Stop) -> StepResult | None:
    """The next step; None where a signal did not wait for its end, and all is as it was before."""
    if trainer.processes.size > 1:  # the others would wait for this one
        return stepper.step(trainer.take_batches(), lr, norms)
    position, random = trainer.batches.state(), trainer.random_state()
    try:
        with stop.abandoning(lambda: stepper.can_abandon):
            return stepper.step(trainer.take_batches(), lr, norms)
    except Stopped:
        if stop.insists or not stepper.restart():
            raise
        stop.heed()
        trainer.batches.load_state(position)
        trainer.set_random_state(random)
        return None


def _introduce(trainer: Trainer, progress: Progress) -> None:
    size, config, placement = trainer.processes.size, trainer.model.config, trainer.placement
    parts = [f"{config.recipe.title} {config.depths.title}", config.experts, f"{_millions(placement.parameters)} parameters"]
    if config.moe is not None:
        parts.append(f"{_millions(placement.active_parameters)} active")
    progress.say(f"{', '.join(filter(None, parts))}, on {trainer.device} in {trainer.config.precision}")
    progress.say(trainer.batches.summary)
    if size > 1:
        progress.say(f"{size} processes, {size * trainer.config.accumulate} batches a step")
    if trainer.step:
        progress.say(f"resumed at step {trainer.step}")


def _millions(count: int) -> str:
    return f"{count / 1e6:.{1 if count >= 1e6 else 2}f} M"


def _log(trainer: Trainer, lr: float, metrics: Metrics, progress: Progress) -> None:
    window, trainer.window = trainer.window, Window()
    summary = window.summary()
    epoch = trainer.batches.epoch + trainer.batches.index / len(trainer.batches)
    metrics.write("train", trainer.step, **summary, lr=lr, epoch=epoch, seconds=trainer.seconds)
    if trainer.routing is not None:
        metrics.write("routing", trainer.step, **window.parts(), **trainer.routing.read())
    progress.update(trainer.step, _shown(summary), logged=True)


def _shown(summary: dict[str, float]) -> dict[str, str]:
    return {"loss": f"{summary['nll']:.3f}", "tokens/s": f"{summary['tokens_per_second']:,.0f}"}


def _validate_and_save(
    trainer: Trainer, stepper: Stepper, metrics: Metrics, progress: Progress, recorder: Recorder, stop: Stop, saver: Saver
) -> None:
    """What the step that was taken last asks for. A signal ends the validation, and a resumed run begins with it."""
    improved = False
    if trainer.validation_due:
        random = trainer.random_state()
        try:
            improved = _validate(trainer, stepper, metrics, progress, recorder, stop)
        except Stopped:
            if stop.insists:
                raise
            stop.heed()
            trainer.set_random_state(random)
            progress.say(f"step {trainer.step}: its validation was ended by a signal; a resumed run begins with it")
            return
    if (improved and trainer.config.save_best) or (trainer.step and trainer.step % trainer.config.save_every == 0):
        _save(trainer, saver)


def _validate(trainer: Trainer, stepper: Stepper, metrics: Metrics, progress: Progress, recorder: Recorder, stop: Stop) -> bool:
    """Whether it is the best so far."""
    found = _measure(trainer, stepper, recorder, stop)
    trainer.validated = trainer.step
    if found is None:
        return False
    metrics.write("valid", trainer.step, **found.metrics())
    progress.say(f"step {trainer.step}: validation {found}")
    return trainer.best.update(trainer.processes.of_first(found.quality), trainer.step)


def _measure(trainer: Trainer, stepper: Stepper, recorder: Recorder, stop: Stop) -> Validation | None:
    """What the task finds. A signal to one of several processes raises `Stopped` on all of them.

    Each asks the others before each run of the recorder, and once at the end. One that a signal ends between two such
    questions asks once more, and this is the next question of the others; but those that share experts run together.
    """
    processes, together = trainer.processes, trainer.placement.shared
    agreed = False

    def ask() -> None:
        nonlocal agreed
        with stop.at_next_step():  # what was agreed would else be lost
            number = processes.largest(stop.signal)
            agreed = number > 0
        if agreed or (stop.signal and not together):
            raise Stopped(number or stop.signal)

    recorder.before_run = ask if processes.size > 1 else None
    try:
        with nullcontext() if together else stop.at_once():
            found = trainer.task.validate(stepper.form, trainer.config.valid_sentences, recorder)
    except Stopped:
        if not agreed:
            processes.largest(stop.signal)
        raise
    if processes.size > 1 and (number := processes.largest(stop.signal)):
        raise Stopped(number)
    return found


def _save(trainer: Trainer, saver: Saver, scheduled: bool = True) -> None:
    """Begin to write a checkpoint, unless this step has one.

    scheduled: every such run has it. A run that is stopped leaves one more: it serves to go on, and for nothing else.
    """
    if trainer.saved not in ((trainer.step, True), (trainer.step, scheduled)):
        state = trainer.state()
        if trainer.processes.first:
            place = {"scheduled": scheduled, "regular_before": trainer.regular}
            saver.save(replace(state, state=state.state | place), trainer.best.step)
        trainer.saved = trainer.step, scheduled
        trainer.regular = trainer.step if scheduled else trainer.regular
