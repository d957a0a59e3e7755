"""Measure the signals of a forecast on every series of benchmarks/dead/design.py: at most 60 steps each, on the CPU.

python benchmarks/forecast/measure.py WORK [--parallel 2]

A series is one model, task, warm-up, eps and seed; benchmarks/dead has its runs at four learning rates, with their labels.
Writes WORK/series.jsonl; the same command goes on where it was stopped. Needs KILOLAYER_DATA.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "dead"))

from design import Run, runs, table_of

from kilolayer.config import build
from kilolayer.data.grammar import write_corpus
from kilolayer.layers.attention import Attention
from kilolayer.probe.critical_rate import critical_rate
from kilolayer.probe.forecast import HIGHEST, LOWEST, STEPS
from kilolayer.probe.hooks import top_states
from kilolayer.probe.propagation import relative_update
from kilolayer.probe.trial import Trial
from kilolayer.runs.run import cache_folder, prepare
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.task import Task

START_LR = 1e-5
"""Small enough for the output to change linearly."""


@lru_cache
def task_of(kind: str, corpus: Path) -> Task:
    sample = next(run for run in runs() if run.task == kind)
    return prepare(build(RunConfig, table_of(sample, Path(os.environ["KILOLAYER_DATA"]), corpus)), cache_folder())


@contextmanager
def largest_logits(found: list[float]) -> Iterator[None]:
    """Append the largest attention logit of every layer that is run."""
    mix = Attention.mix

    def measured(self: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        with torch.no_grad():
            found.append(float((query @ key.mT).abs().amax()) * query.shape[-1] ** -0.5)
        return mix(self, query, key, value, mask)

    with patch.object(Attention, "mix", measured):
        yield


def range_test(config: RunConfig, task: Task) -> list[dict[str, float]]:
    """Steps with a rising rate: the loss, what reaches the first layers of the weakest stack, and the largest logit."""
    trial, found = Trial(config, task), []
    for index in range(STEPS):
        lr = LOWEST * (HIGHEST / LOWEST) ** (index / (STEPS - 1))
        logits: list[float] = []
        with largest_logits(logits):
            step = trial.step(lr, layers=True)
        found.append({"lr": lr, "nll": step.nll, "reached": step.reached, "gradient": step.gradient, "logit": max(logits)})
        if not step.finite:
            break
    return [{name: float(f"{value:.5g}") for name, value in each.items()} for each in found]


def measure(run: Run, corpus: Path) -> dict[str, Any]:
    """All signals of a series."""
    torch.set_num_threads(1)
    began = time.monotonic()
    task = task_of(run.task, corpus)
    config = task.resolve(build(RunConfig, table_of(run, Path(os.environ["KILOLAYER_DATA"]), corpus)))
    config = replace(config, train=replace(config.train, eager=True))
    swept = range_test(config, task)
    critical = critical_rate(Trial(config, task), task)
    trial = Trial(config, task)
    parts = next(trial.trainer.batches).parts

    def loss(model: Any) -> Tensor:
        found = task.loss(model, parts, hidden_states=False)
        return found.total / found.count

    adam = partial(torch.optim.Adam, lr=START_LR, betas=(config.train.beta1, config.train.beta2), eps=run.eps)
    return {
        "series": run.series,
        "sweep": swept,
        "critical": critical,
        "adam_start": relative_update(trial.model, loss, top_states(loss), adam, "all"),
        "start_lr": START_LR,
        "seconds": round(time.monotonic() - began, 1),
    }


def work(run: Run, corpus: Path) -> tuple[Run, dict[str, Any]]:
    try:
        return run, measure(run, corpus)
    except Exception as error:  # the other series go on
        return run, {"series": run.series, "error": f"{type(error).__name__}: {error}"[:300]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--parallel", type=int, default=2)
    options = parser.parse_args()
    corpus, kept = options.work / "corpus", options.work / "series.jsonl"
    corpus.mkdir(parents=True, exist_ok=True)
    write_corpus(corpus)
    known = {json.loads(line)["series"] for line in kept.read_text().splitlines()} if kept.exists() else set()
    first = {run.series: run for run in reversed(list(runs())) if run.series not in known}
    with ProcessPoolExecutor(options.parallel, mp_context=get_context("spawn")) as pool, kept.open("a") as log:
        for future in as_completed([pool.submit(work, run, corpus) for _, run in sorted(first.items())]):
            run, found = future.result()
            log.write(json.dumps(found) + "\n")
            log.flush()
            print(run.name, found.get("critical"), found.get("seconds"), found.get("error", ""), flush=True)


if __name__ == "__main__":
    main()
