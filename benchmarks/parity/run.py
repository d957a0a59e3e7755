"""The modules of TorchScale, ReZero's and Fixup's authors, and Kilolayer, in one loop (loop.py) that none of them wrote.

python benchmarks/parity/run.py WORK [--parallel 12] [--seconds 600] [--rows post_ln-6 ...] [--tiny]

Every row trains at four learning rates with the first seed; where the best one is at the edge of the grid, the grid grows by
factors of 2; then the second and third seeds train at the best. The results of finished runs are kept in WORK, so that the same
command goes on; results.json and table.md are written from them by `table.py`. Needs KILOLAYER_DATA, and TorchScale
(benchmarks/speed/peers.sh), the package `rezero` and the folder `fairseq` of github.com/hongyi-zhang/Fixup on the PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from loop import Data, Job, train
from models import System
from table import READ

GRID = (5e-4, 1e-3, 2e-3, 4e-3)
SEEDS = (1, 2, 3)
WIDER = 2
"""The most by how many factors of 2 a grid grows at one end."""
TINY = {"dim": 16, "heads": 2, "ffn_dim": 32}


def rows() -> dict[str, tuple[list[System], int]]:
    """What is compared: systems at a depth, by name."""
    found: dict[str, tuple[list[System], int]] = {}
    for layers in (6, 18):
        for method in ("post_ln", "pre_ln", "sub_ln", "deepnorm"):
            systems = [System("torchscale", method), System("kilolayer", method)]
            if layers == 6:
                # TorchScale starts every matrix as nn.Linear does, and multiplies that: ours must do the same with this start.
                others = ("torch",) if method in ("sub_ln", "deepnorm") else ("fairseq", "xavier")
                systems += [System("kilolayer", method, {"init": init}) for init in others]
            found[f"{method}-{layers}"] = (systems, layers)
        for library, method in (("rezero", "rezero"), ("fixup", "r_fixup")):
            found[f"{method}-{layers}"] = ([System(library, method), System("kilolayer", method)], layers)
    return found


class Row:
    """The runs of one system at one depth: proposes the next jobs until the best rate has all seeds."""

    def __init__(self, system: System, layers: int, length: dict[str, int]) -> None:
        self.base = Job(system, layers, GRID[0], **length)
        self.losses: dict[tuple[float, int], float] = {}
        self.asked: set[str] = set()

    def next_jobs(self) -> Iterator[Job]:
        """The jobs that can start now."""
        for job in self._wanted():
            if job.name not in self.asked:
                self.asked.add(job.name)
                yield job

    def _wanted(self) -> Iterator[Job]:
        rates = sorted({*GRID, *(rate for rate, _ in self.losses)})
        yield from (replace(self.base, lr=rate) for rate in rates)
        first = {rate: self.losses.get((rate, SEEDS[0])) for rate in rates}
        if None in first.values():
            return
        best = min(rates, key=lambda rate: first[rate] or 0.0)
        if best == rates[0] and best > GRID[0] / 2**WIDER:
            yield replace(self.base, lr=best / 2)
        elif best == rates[-1] and best < GRID[-1] * 2**WIDER:
            yield replace(self.base, lr=best * 2)
        else:
            yield from (replace(self.base, lr=best, seed=seed) for seed in SEEDS)


class Single(Row):
    """One run at a given rate instead of a search."""

    def __init__(self, system: System, layers: int, length: dict[str, int], lr: float) -> None:
        super().__init__(system, layers, length)
        self.lr = lr

    def _wanted(self) -> Iterator[Job]:
        yield replace(self.base, lr=self.lr)


def cost_of(run: dict[str, Any]) -> float:
    """The loss by which a rate is chosen; a model that does not read its source is worse than any that does."""
    return run["loss"] if run.get("source_gain", 0.0) >= READ else 100.0 + run.get("loss", 100.0)


def propose(series: list[Row], known: dict[str, dict[str, Any]]) -> list[tuple[Row, Job]]:
    """The jobs that can start now; results that are known are taken at once."""
    found: list[tuple[Row, Job]] = []
    for row in series:
        while jobs := list(row.next_jobs()):
            found += [(row, job) for job in jobs if job.name not in known]
            row.losses |= {(job.lr, job.seed): cost_of(known[job.name]) for job in jobs if job.name in known}
    return found


def make_data(path: Path, tiny: bool, steps: int) -> None:
    """Write the batches of German to English as in `kilolayer reproduce deepnet-table1`."""
    from kilolayer.config import build
    from kilolayer.reproduce.lab import Lab
    from kilolayer.runs.run import cache_folder, prepare
    from kilolayer.tasks.config import RunConfig

    lab = Lab(path.parent / "lab", tiny=tiny, data=None if tiny else Path(os.environ["KILOLAYER_DATA"]))
    config = build(RunConfig, lab.translation())
    task: Any = prepare(config, cache_folder())
    train_batches = {}
    for seed in SEEDS:
        batches = task.training_batches(seed)
        # TorchScale cannot attend to a row that is all padding, with which the last batches of an epoch are filled up.
        whole = (batch.parts for batch in batches if bool((batch.labels[:, 0] != 0).all()))
        train_batches[seed] = [next(whole) for _ in range(steps)]
    valid = [
        tuple(part[batch.labels[:, 0] != 0] for part in batch.parts)
        for text in task.corpora.valid
        for batch in task._valid_batches(text, 500)
    ]
    Data(task.resolve(config).model.vocab_size, train_batches, valid).save(path)


DATA: dict[Path, Data] = {}


def work(job: Job, path: Path, size: dict[str, Any]) -> dict[str, Any]:
    """One run in a process of the pool."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    if path not in DATA:
        DATA[path] = Data.load(path)
    try:
        return train(job, DATA[path], size, device)
    except Exception as error:  # the other runs go on
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--parallel", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rows", nargs="*")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    length = {"steps": 10, "warmup": 4} if options.tiny else {}
    size = TINY if options.tiny else {}
    data, kept = options.work / "data.pt", options.work / "runs.jsonl"
    if not data.exists():
        make_data(data, options.tiny, length.get("steps", 1000))
    known = {row["name"]: row for row in map(json.loads, kept.read_text().splitlines())} if kept.exists() else {}
    chosen = {name: row for name, row in rows().items() if not options.rows or name in options.rows}
    series = [Row(system, layers, length) for systems, layers in chosen.values() for system in systems]
    if not options.rows:
        deep = {"deepnorm": ("torchscale", 1e-3), "rezero": ("rezero", 4e-3), "r_fixup": ("fixup", 4e-3)}
        for method, (authors, lr) in deep.items():
            series += [Single(System(library, method), 50, length, lr) for library in (authors, "kilolayer")]
    deadline = time.monotonic() + options.seconds
    running: dict[Future[dict[str, Any]], tuple[Row, Job]] = {}
    waiting: list[tuple[Row, Job]] = []
    with ProcessPoolExecutor(options.parallel, mp_context=get_context("spawn")) as pool, kept.open("a") as log:
        while True:
            waiting += propose(series, known)
            waiting.sort(key=lambda each: -each[1].layers)  # long ones first
            while waiting and len(running) < options.parallel and time.monotonic() < deadline:
                row, job = waiting.pop(0)
                running[pool.submit(work, job, data, size)] = row, job
            if not running:
                break
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                row, job = running.pop(future)
                found = {"name": job.name} | future.result()
                row.losses[job.lr, job.seed] = cost_of(found)
                log.write(json.dumps(found) + "\n")
                log.flush()
                print(found["name"], found.get("loss"), found.get("source_gain"), found.get("seconds"), found.get("error", ""))


if __name__ == "__main__":
    main()
