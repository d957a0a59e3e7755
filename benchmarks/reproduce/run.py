"""Run `kilolayer reproduce` with several runs in each process, which share what torch has compiled.

PYTHONPATH=src python benchmarks/reproduce/run.py OUT NAME... [--parallel 12] [--seconds 1500] [--earlier FILE]
    [--part deepnorm,post_ln:6,18 --part admin:50]

The runs, their folders and the results are those of `kilolayer reproduce NAME --out OUT`; only the start of a process, and the
compilation of layers that another run has had compiled, are saved. --part, for deepnet-table1: recipes and depths that are
trained to the end, all seeds included, before the next ones begin.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kilolayer.compare.comparison import Comparison
from kilolayer.compare.machine import demand_of
from kilolayer.compare.result import Member, is_complete
from kilolayer.reproduce import deepnet_table1
from kilolayer.reproduce import lab as laboratory
from kilolayer.reproduce.base import get
from kilolayer.reproduce.lab import Lab, earlier_runs
from kilolayer.reproduce.page import save
from kilolayer.training.run import cache_folder, prepare

GRACE = 45.0
"""Seconds after the deadline in which runs may still end."""


def train(config: Path, folder: Path, log: Path, started_in: Path) -> tuple[int, float]:
    """One run in a process of the pool: the exit code of `kilolayer train`, and the seconds that it took."""
    import torch

    from kilolayer.cli.main import main as command

    began = time.monotonic()
    os.chdir(started_in)
    with log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            code = command(["train", str(config), "--run", str(folder)])
        except SystemExit as ended:
            code = int(ended.code or 0)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return code, time.monotonic() - began


class Pool:
    """Stands in for the queue of comparisons, `run_all`: the same processes train one run after another."""

    def __init__(self, parallel: int, deadline: float) -> None:
        self.executor = ProcessPoolExecutor(parallel, mp_context=get_context("spawn"))
        self.parallel, self.deadline = parallel, deadline

    def run_all(self, comparison: Comparison, **_options: Any) -> int:
        for name in ("logs", "runs"):
            (comparison.folder / name).mkdir(exist_ok=True)
        waiting = [member for member in comparison.members if not is_complete(member)]
        configs = {member.name: comparison.config_of(member) for member in waiting}
        waiting.sort(key=lambda member: -demand_of(configs[member.name]).flops)
        if waiting:
            prepare(configs[waiting[0].name], cache_folder())  # the vocabulary, which all runs then find
        running: dict[Future[tuple[int, float]], Member] = {}
        while (waiting and time.monotonic() < self.deadline) or running:
            while waiting and len(running) < self.parallel and time.monotonic() < self.deadline:
                member = waiting.pop(0)
                paths = comparison.config_path(member), member.folder, comparison.log_path(member), comparison.started_in
                running[self.executor.submit(train, *paths)] = member
            done, _ = wait(running, timeout=5.0, return_when=FIRST_COMPLETED)
            for future in done:
                member, (code, seconds) = running.pop(future), future.result()
                result = comparison.result_of(member)
                took = f"{seconds:.0f} s, {result.seconds or 0:.0f} of them in steps"
                left = self.deadline - time.monotonic()
                print(f"{left:.0f} s left: {member.name}: {result.outcome.text} (code {code}), {took}", flush=True)
            if time.monotonic() > self.deadline + GRACE:
                self.kill()
                return 0
        return 0

    def kill(self) -> None:
        """End all processes of the pool at once."""
        for process in list((self.executor._processes or {}).values()):
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--parallel", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=1500.0)
    parser.add_argument("--earlier", type=Path)
    parser.add_argument("--part", action="append", default=[])
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    pool = Pool(options.parallel, deadline)
    laboratory.run_all = pool.run_all  # pyright: ignore[reportAttributeAccessIssue]
    earlier = () if options.earlier is None else earlier_runs(options.earlier)
    data = None if options.tiny else Path(os.environ["KILOLAYER_DATA"])
    for name in options.names:
        reproduction = get(name)
        lab = Lab(options.out / name, options.tiny, data, options.parallel, deadline, earlier)
        every = deepnet_table1.METHODS
        for part in options.part if name == "deepnet-table1" else ():
            names, _, depths = part.partition(":")
            methods = tuple(each for each in every if (each if isinstance(each, str) else each["name"]) in names.split(","))
            layers = tuple(map(int, depths.split(",")))
            with patch.multiple(deepnet_table1, METHODS=methods, LAYERS=layers):
                reproduction.measure(lab)
        found = reproduction.measure(lab)
        verdict = save(lab.folder, reproduction, found, options.tiny)
        print(json.dumps({"name": name, "verdict": verdict.word, "why": verdict.why}), flush=True)
    pool.kill()
    sys.stdout.flush()
    os._exit(0)  # the executor would wait for processes that were killed


if __name__ == "__main__":
    main()
