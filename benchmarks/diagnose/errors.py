"""Measure what `kilolayer diagnose` measures on runs whose end is known, before training and at half and all of their steps.

python benchmarks/diagnose/errors.py WORK [--seconds 7200]      # needs KILOLAYER_DATA

The runs are those of benchmarks/dead, and before training also those of benchmarks/reproduce/deepnet-table1.json. Before
training, the runs of a series, which differ in their learning rate alone, have one measurement. Every series is measured; then
runs of benchmarks/dead of up to 24 layers are trained again to their end, in an order drawn once in which each depth gets the
same time, until the time is up. Writes WORK/measured.jsonl; the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "dead"))

from design import Run, runs, table_of
from errors_table import RUNS, TABLE1, cell_of

import kilolayer as kl
from kilolayer.config import build
from kilolayer.data.grammar import write_corpus
from kilolayer.evaluate.stack_label import first_layers
from kilolayer.probe.diagnosis import Measurements, first_share, measure
from kilolayer.probe.subject import training_loss
from kilolayer.probe.trial import Trial
from kilolayer.reproduce.lab import Lab
from kilolayer.runs.run import cache_folder, prepare
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.task import Task
from kilolayer.training.schedule import learning_rate

XAVIER = ("pre_ln", "post_ln")
"""Recipes whose single stacks started from Xavier's deviation when the runs were labelled, and have another default now."""

DEEPEST = 24
"""Layers per side of the deepest runs that are trained again."""
SLOW = ("table1 admin 100L",)
"""Not measured: Admin's start is profiled layer by layer, which takes ten minutes here, and one run of it has a label."""
BATCH = 512
"""Tokens of the batch on which those of deepnet-table1 are measured; they train with 4,096."""


def labelled() -> dict[str, dict[str, Any]]:
    """The labelled runs, by name."""
    return {run["name"]: run for run in json.loads(RUNS.read_text())["runs"]}


def configuration(run: Run, corpus: Path) -> RunConfig:
    """The configuration that the run was labelled with."""
    table = table_of(run, Path(os.environ["KILOLAYER_DATA"]), corpus)
    if run.task != "translation" and run.recipe in XAVIER:
        table["model"]["recipe"] = {"name": run.recipe, "init": "xavier"}
    return build(RunConfig, table)


@lru_cache
def task_of(kind: str, corpus: Path) -> Task:
    return prepare(configuration(next(run for run in runs() if run.task == kind), corpus), cache_folder())


def numbers(found: Measurements) -> dict[str, Any]:
    """What the rules judge, by stack.

    first, last: the gradient of the first tenth of its layers, and of its last layer, over its own largest; reached: that of
    the first tenth over the largest of the model. over_eps: the smallest gradient per parameter over eps. growth: of the
    residual stream. cosine, rank: of the states after its last layer. entropy: for each kind of attention the smallest, the
    upper median and the mean of its layers. idle: the largest and the mean share of dead ReLUs.
    """
    gradients, eps = found.gradients, found.gradients.over_eps(found.settings.eps)
    stacks = {}
    for side, norms in gradients.trained.items():
        largest, sizes = max(norms), found.residual[side]
        stacks[side] = {
            "first": first_share(norms),
            "last": norms[-1] / largest if largest else math.nan,
            "reached": first_layers(norms) / gradients.largest if gradients.largest else math.nan,
            "over_eps": min(_known(eps[side]), default=math.nan),
            "growth": sizes[-1] / sizes[0] if sizes[0] else math.nan,
            "cosine": found.rank.cosine[side][-1],
            "rank": found.rank.effective[side][-1],
            "entropy": {kind: _low_median_mean(_known(values)) for kind, values in found.entropy[side].items()},
            "idle": _most_mean(_known(found.dead_units.get(side, ()))),
        }
    return {
        "loss": found.loss,
        "gradient": gradients.total,
        "largest": gradients.largest,
        "output_at_zero": found.output_at_zero,
        "stacks": stacks,
    }


def _known(values: tuple[float, ...]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _low_median_mean(values: list[float]) -> list[float]:
    # The upper median is below a limit if more than half of the layers are.
    return [min(values), sorted(values)[len(values) // 2], fmean(values)] if values else []


def _most_mean(values: list[float]) -> list[float]:
    return [max(values), fmean(values)] if values else []


def digits(value: Any) -> Any:
    """Four digits of every number; null for those that are not finite."""
    match value:
        case float():
            return float(f"{value:.4g}") if math.isfinite(value) else None
        case dict():
            return {key: digits(each) for key, each in value.items()}
        case list():
            return [digits(each) for each in value]
        case _:
            return value


def table1_cells() -> dict[str, dict[str, Any]]:
    """The methods and depths of deepnet-table1 that have a result: the options of one run each."""
    document = json.loads(TABLE1.read_text())
    found = document["found"]
    runs_of_it = [*found["runs"], *found["not_chosen"], *document.get("not_asked", [])]
    known = [run["options"] for run in runs_of_it if run["outcome"] not in ("waiting", "unfinished")]
    found = {cell_of(options): options for options in sorted(known, key=lambda each: each["layers"])}
    return {cell: options for cell, options in found.items() if cell not in SLOW}


def table1_configuration(options: dict[str, Any], work: Path) -> RunConfig:
    table = Lab(work / "lab", data=Path(os.environ["KILOLAYER_DATA"])).translation()
    table["model"] |= {"recipe": options["model.recipe"], "layers": options["layers"]}
    table["train"] |= {"seed": 1, "device": "cpu"}
    table["batches"] = {**table.get("batches", {}), "tokens": BATCH}
    return build(RunConfig, table)


def before(run: Run, corpus: Path) -> Measurements:
    return kl.diagnose(configuration(run, corpus), device="cpu").measured


def trained(run: Run, corpus: Path, checks: dict[str, list[tuple[int, float]]]) -> dict[str, Any]:
    """Train a run again: its measurements at half and all of its steps, and whether its stacks had the checks of before."""
    task = task_of(run.task, corpus)
    config = task.resolve(configuration(run, corpus))
    trial, plain = Trial(config, task), Trial(replace(config, train=replace(config.train, eager=True)), task)
    settings = before(run, corpus).settings
    loss = training_loss(task, run.seed, 1, of="total")
    found: dict[str, Any] = {}
    same: list[bool] = []
    for step in range(1, run.steps + 1):
        trial.step(learning_rate(trial.config.train, step))
        if trial.trainer.guard.in_a_row >= 10:
            break
        for side, check in trial.trainer.watch.check(step).items():
            same.append([step, float(f"{check.reached:.3g}")] in checks[side])
        if step in (run.steps // 2, run.steps):
            plain.model.load_state_dict(trial.model.state_dict())
            at = replace(settings, step=step)
            found["half" if step < run.steps else "end"] = numbers(measure(plain.model, loss, at))
    return found | {"same_checks": fmean(same) if same else None}


def cost(run: Run) -> float:
    """Layers times steps, about proportional to the time that a run takes."""
    return run.steps * run.layers * (2 if run.task == "translation" else 1) * run.dim / 32


def in_order(known: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Run | str]]:
    """First a run of each series and the cells of deepnet-table1; then those to train, each depth for the same time."""
    own = [run for run in runs() if run.name in known]
    first = {run.series: run for run in reversed(own)}
    yield from (("start", run) for _, run in sorted(first.items()))
    random.Random(30).shuffle(own)
    spent: dict[int, float] = {}
    due = {}
    for run in own:
        if run.layers > DEEPEST:
            continue
        spent[run.layers] = due[run] = spent.get(run.layers, 0.0) + cost(run)
    yield from (("table1", cell) for cell in table1_cells())
    yield from (("trained", run) for run in sorted(due, key=due.__getitem__))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--seconds", type=float, default=7200.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    corpus, kept = options.work / "corpus", options.work / "measured.jsonl"
    corpus.mkdir(parents=True, exist_ok=True)
    write_corpus(corpus)
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done, known = {(row["kind"], row["name"]) for row in rows}, labelled()
    deadline = time.monotonic() + options.seconds
    with kept.open("a") as log:
        for kind, each in in_order(known):
            name = each if isinstance(each, str) else each.name
            if (kind, name) in done:
                continue
            if time.monotonic() > deadline:
                break
            began = time.monotonic()
            if isinstance(each, str):
                config = table1_configuration(table1_cells()[each], options.work)
                found = {"start": numbers(kl.diagnose(config, device="cpu").measured)}
            elif kind == "start":
                found = {"series": each.series, "start": numbers(before(each, corpus))}
            else:
                found = {"series": each.series, **trained(each, corpus, known[name]["stacks"])}
            row = {"kind": kind, "name": name, **digits(found)}
            log.write(json.dumps(row | {"seconds": round(time.monotonic() - began, 1)}) + "\n")
            log.flush()
            print(kind, name, row.get("same_checks"), round(time.monotonic() - began, 1), flush=True)


if __name__ == "__main__":
    main()
