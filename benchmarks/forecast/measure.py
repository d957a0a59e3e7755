"""What one process measures: a training run, or the measurements from which a row is forecast."""

from __future__ import annotations

import gc
import math
import statistics
import time
from functools import lru_cache, partial
from typing import Any

import torch
from grid import Job, Row, table_of

from kilolayer.config import build, merge
from kilolayer.probe.propagation import relative_update
from kilolayer.probe.range_test import sweep_rates
from kilolayer.probe.sharpness import adam_denominators, saved_squares, sharpness
from kilolayer.probe.trial import Measured, Trial
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.task import Task
from kilolayer.training.run import cache_folder, prepare
from kilolayer.training.schedule import learning_rate

PROBED = 60  # steps of a forecast
REFERENCE = 1e-4  # learning rate of the single update, and of the steps before the sharpness
SETTLING = 20


@lru_cache
def task_of(text: str, size: tuple[tuple[str, Any], ...]) -> Task:
    """The text's data, read once per process."""
    return prepare(build(RunConfig, table_of(Row(text, "pre_ln", 1), dict(size))), cache_folder())


def configured(row: Row, size: dict[str, Any], **train: Any) -> tuple[RunConfig, Task]:
    """The configuration of a row's run, as the task resolves it, and its data."""
    task = task_of(row.text, tuple(sorted(size.items())))
    config = build(RunConfig, merge(table_of(row, size), {"train": train}))
    return task.resolve(config), task


def train(job: Job, size: dict[str, Any]) -> dict[str, Any]:
    """Train one run; returns its loss in windows, and the gradient of its weakest stack at twelve moments."""
    began = time.monotonic()
    steps = size["steps"]
    config, task = configured(job.row, size, lr=job.lr, warmup_steps=max(1, round(job.warmup * steps)))
    trial = Trial(config, task)
    every, window = max(1, steps // 12), max(1, steps // 20)
    losses: list[float] = []
    pulse: list[dict[str, float]] = []
    for step in range(1, steps + 1):
        looked = step == 1 or step % every == 0
        found = trial.step(learning_rate(trial.config.train, step), layers=looked)
        losses.append(found.nll)
        if looked:
            pulse.append({"step": step, "share": share(found), "reached": found.reached})
        if trial.trainer.guard.in_a_row >= 10:
            break
    last = losses[-max(1, steps // 10) :]
    whole = len(losses) == steps and all(map(math.isfinite, last))
    return {
        "row": vars(job.row),
        "lr": job.lr,
        "warmup": job.warmup,
        "steps": len(losses),
        "loss": statistics.fmean(last) if whole else math.inf,
        "losses": [statistics.fmean(losses[at : at + window]) for at in range(0, len(losses), window)],
        "pulse": pulse,
        "frequency_loss": task.frequency_loss(),
        "seconds": round(time.monotonic() - began, 1),
    }


def measure_candidates(row: Row, size: dict[str, Any]) -> dict[str, Any]:
    """The measurements for all candidates, from at most 60 steps each."""
    began = time.monotonic()
    config, task = configured(row, size, eager=True)
    ramp = [seen(each) for each in sweep_rates(Trial(config, task), PROBED)]
    config, _ = configured(row, size, eager=True, precision="fp32")  # curvature needs fp32
    trial = Trial(config, task)
    model, parts = trial.trainer.model, tuple(part.to(trial.trainer.device) for part in next(trial.trainer.batches).parts)

    def loss(model: Any) -> Any:
        found = task.loss(model, parts, hidden_states=False)
        return found.total / found.count

    def output(model: Any) -> Any:
        logits = task.loss(model, parts, hidden_states=False).output.logits
        assert logits is not None
        return logits.float()

    update = relative_update(model, loss, output, partial(torch.optim.Adam, lr=REFERENCE))
    for _ in range(SETTLING):
        trial.step(REFERENCE)
    squares, taken = saved_squares(model, trial.trainer.optimizer.tensors())
    denominators = adam_denominators(squares, taken, beta2=config.train.beta2, eps=config.train.eps)
    sharp = sharpness(model, loss, denominators=denominators, most=40, tolerance=1e-3)
    seconds = round(time.monotonic() - began, 1)
    return {"row": vars(row), "ramp": ramp, "update": update, "sharpness": vars(sharp), "seconds": seconds}


def share(step: Measured) -> float:
    """The weakest stack's part of the whole gradient, as if all of its layers had the gradient of its median layer."""
    if not (step.finite and step.gradient > 0 and step.stacks):
        return 0.0
    return min(statistics.median(norms) * math.sqrt(len(norms)) for norms in step.stacks.values()) / step.gradient


def seen(step: Measured) -> dict[str, float]:
    return {"lr": step.lr, "nll": step.nll, "gradient": step.gradient, "share": share(step), "reached": step.reached}


def work(job: tuple[str, Any, dict[str, Any]]) -> tuple[str, str, dict[str, Any]]:
    """Run one job in a pool process; a failure is recorded as a result."""
    stage, what, size = job
    torch.set_num_threads(1)
    try:
        found = train(what, size) if stage == "runs" else measure_candidates(what, size)
    except Exception as error:  # the other jobs continue
        found = {"error": f"{type(error).__name__}: {error}"[:300]}
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return stage, what.name, found
