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
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from mps import start_service
from reproduce.keep import text_of, without_folders

from kilolayer.compare.comparison import Comparison
from kilolayer.compare.machine import demand_of
from kilolayer.compare.measure import measures_of
from kilolayer.compare.result import Member, Result, is_complete
from kilolayer.config import Table
from kilolayer.files.writing import write
from kilolayer.reproduce import lab as laboratory
from kilolayer.reproduce.lab import Lab, as_json, digest_of, earlier_runs
from kilolayer.reproduce.stored_run import Run, ended
from kilolayer.reproduce.sweep import at_best_rate
from kilolayer.runs.run import cache_folder, prepare
from kilolayer.tasks.config import RunConfig

ENDING, GRACE = 20.0, 50.0
"""Seconds after the deadline at which the runs under way are asked to stop with a checkpoint, and at which they are killed."""


def train(config: Path, folder: Path, log: Path, started_in: Path) -> tuple[int, float]:
    """One run in a process of the pool, or what is left of it: the exit code of `kilolayer train`, and the seconds it took."""
    import torch

    from kilolayer.cli.main import main as command

    began, begun = time.monotonic(), (folder / "config.toml").exists()
    os.chdir(started_in)
    with log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            code = command(["train", *(["--resume", str(folder)] if begun else [str(config), "--run", str(folder)])])
        except SystemExit as ended:
            code = int(ended.code or 0)
        except Exception:  # the other runs go on
            traceback.print_exc()
            code = 1
    gc.collect()
    if torch.cuda.is_available():
        try:
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)  # after such an error no other run works in this process
    return code, time.monotonic() - began


def kind_of(config: RunConfig) -> str:
    """The task and the recipe of a run; an image tokenizer has none."""
    return " ".join((config.task, *([] if config.own_model is not None else [config.model.recipe.name])))


class Workers:
    """Single processes, each of which trains one run after another; one that dies is replaced.

    On a GPU they run at the same time, under NVIDIA's multi-process service, where it is installed.
    """

    def __init__(self, count: int, deadline: float) -> None:
        self.deadline, self.asked, self.asking = deadline, False, threading.Lock()
        self.service = start_service()
        self.idle: SimpleQueue[ProcessPoolExecutor] = SimpleQueue()
        self.every: list[ProcessPoolExecutor] = []
        for _ in range(count):
            self.add()

    def add(self) -> None:
        """Add an idle process."""
        self.every.append(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
        self.idle.put(self.every[-1])

    def take(self, seconds: float) -> ProcessPoolExecutor | None:
        """An idle process, waited for as long as that; None if there is none."""
        try:
            return self.idle.get(timeout=seconds)
        except Empty:
            return None

    def end_late(self) -> bool:
        """Ask the runs to stop once ENDING is over, and kill them once GRACE is: whether they have been killed."""
        late = time.monotonic() - self.deadline
        with self.asking:  # once: a second signal would end a run without a checkpoint
            if late > ENDING and not self.asked:
                self.asked = True
                self._each(BaseProcess.terminate)
        if late > GRACE:
            self.kill()
        return late > GRACE

    def kill(self) -> None:
        """End all processes at once."""
        self._each(BaseProcess.kill)
        service, self.service = self.service, None  # several threads may come here
        if service is not None:
            service.stop()

    def _each(self, end: Callable[[Any], None]) -> None:
        for executor in self.every:
            for process in list((executor._processes or {}).values()):
                end(process)


class Pool:
    """Stands in for the queue of comparisons, `run_all`: the same processes train one run after another.

    Several comparisons can be trained at once, by threads. A run is not begun if it would not end in time at the pace of the
    last one of its task and recipe, or at the fastest pace of its task. At the deadline the runs under way stop with a
    checkpoint, from which the same command goes on. `out`/ended.json has every run that has ended so far, for --earlier,
    whatever happens to the others; what a reproduction reads of a run beyond its losses and scores is in its found.json alone.
    """

    def __init__(self, parallel: int, deadline: float, out: Path) -> None:
        self.workers, self.parallel, self.deadline = Workers(parallel, deadline), parallel, deadline
        self.path, self.vocabulary, self.writing = out / "ended.json", threading.Lock(), threading.Lock()
        self.ended: list[Run] = json.loads(self.path.read_text())["runs"] if self.path.exists() else []
        self.pace: dict[str, float] = {}
        """Seconds per FLOP of the last run of a task and recipe; its first one also compiles."""

    def run_all(self, comparison: Comparison, **_options: Any) -> int:
        for name in ("logs", "runs"):
            (comparison.folder / name).mkdir(exist_ok=True)
        waiting = [member for member in comparison.members if not is_complete(member)]
        configs = {member.name: comparison.config_of(member) for member in waiting}
        flops = {name: demand_of(config).flops for name, config in configs.items()}
        kinds = {name: kind_of(config) for name, config in configs.items()}
        # The longest first; those of about the same cost stay in the given order.
        waiting.sort(key=lambda member: -round(math.log2(flops[member.name])))
        if waiting and time.monotonic() < self.deadline:
            with self.vocabulary:
                prepare(configs[waiting[0].name], cache_folder())  # which all runs then find
        running: dict[Future[tuple[int, float]], tuple[Member, ProcessPoolExecutor]] = {}
        again: set[str] = set()
        while waiting or running:
            left = self.deadline - time.monotonic()
            waiting = [each for each in waiting if flops[each.name] * self.pace_of(kinds[each.name]) < left]
            while waiting and (worker := self.workers.take(0 if running else 5)) is not None:
                member = waiting.pop(0)
                paths = comparison.config_path(member), member.folder, comparison.log_path(member), comparison.started_in
                running[worker.submit(train, *paths)] = member, worker
            done, _ = wait(running, timeout=5.0, return_when=FIRST_COMPLETED)
            for future in done:
                member, worker = running.pop(future)
                try:
                    code, seconds = future.result()
                except BrokenProcessPool:
                    if time.monotonic() > self.deadline:
                        continue
                    self.workers.add()
                    waiting += [member] * (member.name not in again)
                    again.add(member.name)
                    print(f"{member.name}: its process ended, see {comparison.log_path(member)}", flush=True)
                    continue
                self.workers.idle.put(worker)
                if code == 0:
                    self.pace[kinds[member.name]] = seconds / flops[member.name]
                result = self.recorded(comparison, member)
                took = f"{seconds:.0f} s, {result.seconds or 0:.0f} of them in steps"
                left = self.deadline - time.monotonic()
                print(f"{left:.0f} s left: {member.name}: {result.outcome.text} (code {code}), {took}", flush=True)
            if self.workers.end_late():
                return 0
        return 0

    def pace_of(self, kind: str) -> float:
        """The last pace of runs of a kind; before the first of them has ended, the fastest of the same task."""
        task, _, _ = kind.partition(" ")
        same = [pace for other, pace in list(self.pace.items()) if other.partition(" ")[0] == task]
        return self.pace.get(kind, min(same, default=0.0))

    def recorded(self, comparison: Comparison, member: Member) -> Result:
        """The result of a run, which is kept on disk if it has ended."""
        result = comparison.result_of(member)
        chosen_by, _ = measures_of([result], None if comparison.task is None else comparison.task.headline)
        run = as_json(result, chosen_by) | {"options": dict(member.options), "config": digest_of(comparison.base or {})}
        if ended(run):
            with self.writing:
                self.ended.append(run)
                write(self.path, text_of({"made_with": versions(), "runs": self.ended}) + "\n")
        return result

    def lab(self, folder: Path, tiny: bool, earlier: Sequence[Path]) -> Lab:
        """A laboratory whose runs are trained here. earlier: files with results of other sessions, not trained again."""
        laboratory.run_all = self.run_all  # pyright: ignore[reportAttributeAccessIssue]
        data = None if tiny else Path(os.environ["KILOLAYER_DATA"])
        known = tuple(run for path in earlier for run in earlier_runs(path))
        return Lab(folder, tiny, data, self.parallel, self.deadline, known)

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

    def leave(self, code: int = 0) -> None:
        """End the program without waiting for processes that were killed."""
        self.workers.kill()
        sys.stdout.flush()
        os._exit(code)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a program that trains in a pool."""
    parser.add_argument("--parallel", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=1500.0)
    parser.add_argument("--earlier", type=Path, action="append", default=[])
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
    parser.add_argument("--recipes", nargs="+", help="only these")
    parser.add_argument("--layers", type=int, help="another depth; the results are then in OUT/NAME-LAYERSL.json")
    add_options(parser)
    options = parser.parse_args()
    if options.recipes is not None:
        settings = [each for each in settings if each["model.recipe"] in options.recipes]
        command += f" --recipes {' '.join(options.recipes)}"
    if options.layers is not None:
        settings = [{**each, "layers": options.layers} for each in settings]
        name, command = f"{name}-{options.layers}L", f"{command} --layers {options.layers}"
    pool = Pool(options.parallel, time.monotonic() + options.seconds, options.out)
    lab = pool.lab(options.out / name, options.tiny, options.earlier)
    settings = [{**each, "layers": 1} for each in settings] if options.tiny else settings
    lab = replace(lab, earlier=lab.earlier + pool.at_best_rates(lab, name, config(lab), settings, rates, seeds))
    found = at_best_rate(lab, name, config(lab), settings, rates, seeds)
    about = {"command": command, "made_with": versions()}
    write(options.out / f"{name}.json", text_of(without_folders(about | found)) + "\n")
    pool.leave()
