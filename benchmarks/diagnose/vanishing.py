"""Test the limit of "vanishing gradient" on runs that it was not chosen on: norms after the sum, at depths on both sides of it.

python benchmarks/diagnose/vanishing.py WORK [--parallel 2] [--seconds 3600]      # needs KILOLAYER_DATA

Depths, widths and seeds are others than those of benchmarks/dead. Every candidate is measured before training; those whose
first layers have a share of the gradient in BETWEEN are trained to their end at each of RATES, and labelled as there. The same
command goes on where it was stopped. Writes vanishing.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "dead"))

from design import TASKS, Run, table_of
from table import labelled
from train import train

import kilolayer as kl
from kilolayer.config import build
from kilolayer.data.grammar import write_corpus
from kilolayer.probe.diagnosis import first_share
from kilolayer.tasks.config import RunConfig

HERE = Path(__file__).parent
RECIPES = ("post_ln", "b2t", "mix_ln", "ds_init")
DEPTHS, DIMS = (15, 20, 30, 40, 64), (48, 80)
RATES = (2.5e-4, 1e-3, 4e-3)
BETWEEN = (0.01, 0.5)
STEPS = 300


def candidates() -> Iterator[Run]:
    """One run for each model, at no rate yet."""
    dice = random.Random(31)
    for index, (task, recipe, layers) in enumerate((t, r, n) for t in TASKS for r in RECIPES for n in DEPTHS):
        if task == "translation" and layers > 50:
            continue
        dim, warmup, seed = dice.choice(DIMS), dice.choice((0.05, 0.1, 0.2, 0.4)), dice.randrange(1000, 2000)
        yield Run(index, "test", task, recipe, layers, dim, 0.0, warmup, 1e-8, seed, STEPS)


def measured(run: Run, corpus: Path) -> dict[str, Any]:
    """The smallest share of the first layers' gradient, of all stacks, before training."""
    torch.set_num_threads(1)
    table = table_of(replace(run, lr=1e-3), Path(os.environ["KILOLAYER_DATA"]), corpus)
    found = kl.diagnose(build(RunConfig, table), device="cpu").measured
    return asdict(run) | {"first": min(float(f"{first_share(norms):.4g}") for norms in found.gradients.trained.values())}


def trained(run: Run, corpus: Path) -> dict[str, Any]:
    """The run with its label."""
    found = train(run, corpus)
    row = labelled({"name": run.name} | found)
    return {name: value for name, value in row.items() if name != "stacks"} | {
        "series": run.series,
        "seconds": found["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3600.0)
    options = parser.parse_args()
    corpus, path = options.work / "corpus", HERE / "vanishing.json"
    corpus.mkdir(parents=True, exist_ok=True)
    write_corpus(corpus)
    kept = json.loads(path.read_text()) if path.exists() else {}
    starts: dict[str, Any] = kept.get("before", {})
    runs: dict[str, Any] = kept.get("runs", {})
    deadline = time.monotonic() + options.seconds

    def save() -> None:
        made_with = {"torch": torch.__version__, "python": platform.python_version()}
        command = "python benchmarks/diagnose/vanishing.py WORK"
        path.write_text(
            json.dumps({"command": command, "made_with": made_with, "before": starts, "runs": runs}, indent=1) + "\n"
        )

    with ProcessPoolExecutor(options.parallel, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(measured, run, corpus): run.name for run in candidates() if run.name not in starts}
        for done in as_completed(waiting):
            starts[waiting[done]] = done.result()
            save()
        chosen = [run for run in candidates() if BETWEEN[0] < starts[run.name]["first"] < BETWEEN[1]]
        due = [replace(run, lr=lr) for run in chosen for lr in RATES]
        random.Random(32).shuffle(due)
        left = iter([run for run in due if run.name not in runs])
        running = {}
        while True:
            while len(running) < options.parallel and time.monotonic() < deadline and (run := next(left, None)) is not None:
                running[pool.submit(trained, run, corpus)] = run.name
            if not running:
                break
            done = next(as_completed(running))
            name = running.pop(done)
            runs[name] = done.result()
            save()
            print(name, runs[name]["label"], runs[name]["seconds"], flush=True)


if __name__ == "__main__":
    main()
