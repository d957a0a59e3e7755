"""Processes that train one run after another, and share what torch has compiled; they stand in for a comparison's queue."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from kilolayer.compare.comparison import Comparison
from kilolayer.compare.machine import demand_of
from kilolayer.compare.result import Member, is_complete
from kilolayer.config import Table
from kilolayer.reproduce import lab as laboratory
from kilolayer.reproduce.lab import Lab, earlier_runs
from kilolayer.reproduce.stored_run import Run, ended
from kilolayer.reproduce.sweep import at_best_rate
from kilolayer.runs.run import cache_folder, prepare

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
    """Stands in for the queue of comparisons, `run_all`: the same processes train one run after another.

    Several comparisons can be trained at once, by threads. A run is not begun if it would not end in time at the pace of the
    last one of its recipe.
    """

    def __init__(self, parallel: int, deadline: float) -> None:
        self.executor = ProcessPoolExecutor(parallel, mp_context=get_context("spawn"))
        self.parallel, self.deadline = parallel, deadline
        self.slots, self.vocabulary = threading.Semaphore(parallel), threading.Lock()
        self.pace: dict[str, float] = {}
        """Seconds per FLOP of the last run of a recipe; its first one also compiles."""

    def run_all(self, comparison: Comparison, **_options: Any) -> int:
        for name in ("logs", "runs"):
            (comparison.folder / name).mkdir(exist_ok=True)
        waiting = [member for member in comparison.members if not is_complete(member)]
        configs = {member.name: comparison.config_of(member) for member in waiting}
        flops = {name: demand_of(config).flops for name, config in configs.items()}
        recipes = {name: config.model.recipe.name for name, config in configs.items()}
        # The longest first; those of about the same cost stay in the given order.
        waiting.sort(key=lambda member: -round(math.log2(flops[member.name])))
        if waiting:
            with self.vocabulary:
                prepare(configs[waiting[0].name], cache_folder())  # which all runs then find
        running: dict[Future[tuple[int, float]], Member] = {}
        while waiting or running:
            left = self.deadline - time.monotonic()
            waiting = [each for each in waiting if flops[each.name] * self.pace.get(recipes[each.name], 0.0) < left]
            while waiting and self.slots.acquire(timeout=0 if running else 5):
                member = waiting.pop(0)
                paths = comparison.config_path(member), member.folder, comparison.log_path(member), comparison.started_in
                running[self.executor.submit(train, *paths)] = member
            done, _ = wait(running, timeout=5.0, return_when=FIRST_COMPLETED)
            for future in done:
                self.slots.release()
                member = running.pop(future)
                try:
                    code, seconds = future.result()
                except BrokenProcessPool:
                    return 0  # killed at the deadline by another thread
                self.pace[recipes[member.name]] = seconds / flops[member.name]
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

    def lab(self, folder: Path, tiny: bool, earlier: Path | None) -> Lab:
        """A laboratory whose runs are trained here. earlier: a file with results of another session, not trained again."""
        laboratory.run_all = self.run_all  # pyright: ignore[reportAttributeAccessIssue]
        data = None if tiny else Path(os.environ["KILOLAYER_DATA"])
        return Lab(folder, tiny, data, self.parallel, self.deadline, () if earlier is None else earlier_runs(earlier))

    def at_best_rates(
        self,
        lab: Lab,
        name: str,
        config: Table,
        settings: Sequence[Mapping[str, Any]],
        rates: tuple[float, ...],
        seeds: tuple[int, ...],
    ) -> tuple[Run, ...]:
        """The runs of `at_best_rate` for each setting by itself, all at once: no setting waits for another's runs."""

        def search(index: int, setting: Mapping[str, Any]) -> list[Run]:
            own = replace(lab, folder=lab.folder.parent / "searches" / f"{name}-{index}" / name)
            found = at_best_rate(own, name, config, [setting], rates, seeds)
            return [*found["runs"], *found["not_chosen"]]

        with ThreadPoolExecutor(len(settings)) as threads:
            found = threads.map(search, range(len(settings)), settings)
            return tuple(run for runs in found for run in runs if ended(run))

    def leave(self) -> None:
        """End the program without waiting for processes that were killed."""
        self.kill()
        sys.stdout.flush()
        os._exit(0)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a program that trains in a pool."""
    parser.add_argument("--parallel", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=1500.0)
    parser.add_argument("--earlier", type=Path)
    parser.add_argument("--tiny", action="store_true")


def versions() -> dict[str, str]:
    """What made the results."""
    import torch

    from kilolayer import __version__

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"kilolayer": __version__, "torch": torch.__version__, "device": device}


def study(
    name: str,
    command: str,
    settings: list[dict[str, Any]],
    rates: tuple[float, ...],
    seeds: tuple[int, ...],
    config: Callable[[Lab], Table],
) -> None:
    """Train every setting at its best rate, as `kilolayer reproduce` does, and write OUT/NAME.json."""
    parser = argparse.ArgumentParser(description=command)
    parser.add_argument("out", type=Path)
    add_options(parser)
    options = parser.parse_args()
    pool = Pool(options.parallel, time.monotonic() + options.seconds)
    lab = pool.lab(options.out / name, options.tiny, options.earlier)
    lab = replace(lab, earlier=lab.earlier + pool.at_best_rates(lab, name, config(lab), settings, rates, seeds))
    found = at_best_rate(lab, name, config(lab), settings, rates, seeds)
    about = {"command": command, "made_with": versions()}
    (options.out / f"{name}.json").write_text(json.dumps(about | found, indent=1) + "\n")
    pool.leave()
