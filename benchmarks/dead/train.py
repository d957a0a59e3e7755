"""Train the runs of design.py to their end on the CPU, one per core, and keep what was seen of each.

python benchmarks/dead/train.py WORK [--images] [--parallel 2] [--seconds 36000] [--only NAME]

Writes WORK/runs.jsonl, one line per run; the same command goes on where it was stopped. Needs KILOLAYER_DATA. --images: the
runs of image classifiers, and no others.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from design import Run, image_runs, runs, table_of

from kilolayer.config import build
from kilolayer.data.grammar import write_corpus
from kilolayer.evaluate.stack_label import StackCheck
from kilolayer.probe.trial import Trial
from kilolayer.runs.run import cache_folder, prepare
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.task import Task
from kilolayer.training.schedule import learning_rate

POINTS = 20
"""Means of the training loss that are kept of a run."""


@lru_cache
def task_of(kind: str, corpus: Path) -> tuple[Task, float | None]:
    """The data of a task, read once per process, and the loss of predicting token frequencies."""
    sample = next(run for run in (*runs(), *image_runs()) if run.task == kind)
    task = prepare(build(RunConfig, table_of(sample, Path(os.environ["KILOLAYER_DATA"]), corpus)), cache_folder())
    return task, task.frequency_loss()


def train(run: Run, corpus: Path) -> dict[str, Any]:
    """Train one run; returns its losses and every check of its stacks."""
    torch.set_num_threads(1)
    began = time.monotonic()
    task, frequency_loss = task_of(run.task, corpus)
    config = task.resolve(build(RunConfig, table_of(run, Path(os.environ["KILOLAYER_DATA"]), corpus)))
    trial = Trial(config, task)
    watch = trial.trainer.watch
    losses: list[float] = []
    checks: dict[str, list[StackCheck]] = {}
    for step in range(1, run.steps + 1):
        losses.append(trial.step(learning_rate(trial.config.train, step)).nll)
        if trial.trainer.guard.in_a_row >= 10:
            break
        for side, check in watch.check(step).items():
            checks.setdefault(side, []).append(check)
    whole = len(losses) == run.steps
    validation = task.validate(trial.model, 200) if whole else None
    window = max(1, run.steps // POINTS)
    return asdict(run) | {
        "finished": whole,
        "losses": [_digits(statistics.fmean(losses[at : at + window])) for at in range(0, len(losses), window)],
        "frequency_loss": frequency_loss,
        "valid": None if validation is None else _digits(-validation.quality),
        "source_gain": None if validation is None else _digits(getattr(validation, "source_gain", None)),
        "checks": {
            side: [(check.step, _digits(check.reached), _digits(check.moved)) for check in own] for side, own in checks.items()
        },
        "seconds": round(time.monotonic() - began, 1),
    }


def _digits(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.3g}")


def work(run: Run, corpus: Path) -> tuple[Run, dict[str, Any]]:
    """One run in a process of the pool; a failure is recorded."""
    try:
        return run, train(run, corpus)
    except Exception as error:  # the other runs go on
        return run, asdict(run) | {"error": f"{type(error).__name__}: {error}"[:300]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=36_000.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--images", action="store_true")
    options = parser.parse_args()
    corpus, kept = options.work / "corpus", options.work / "runs.jsonl"
    corpus.mkdir(parents=True, exist_ok=True)
    write_corpus(corpus)
    known = {json.loads(line)["name"] for line in kept.read_text().splitlines()} if kept.exists() else set()
    chosen = image_runs() if options.images else runs()
    left = [run for run in chosen if run.name not in known and options.only in run.name]
    deadline = time.monotonic() + options.seconds
    with ProcessPoolExecutor(options.parallel, mp_context=get_context("spawn")) as pool, kept.open("a") as log:
        waiting = iter(left)
        running = {pool.submit(work, run, corpus) for _, run in zip(range(options.parallel), waiting, strict=False)}
        while running:
            future = next(as_completed(running))
            running.remove(future)
            run, found = future.result()
            log.write(json.dumps({"name": run.name} | found) + "\n")
            log.flush()
            print(run.name, *(found.get(name) for name in ("valid", "source_gain", "seconds", "error")), flush=True)
            if time.monotonic() < deadline and (following := next(waiting, None)) is not None:
                running.add(pool.submit(work, following, corpus))


if __name__ == "__main__":
    main()
