"""How many steps a GPU takes in a second when several small runs share it: threads, processes, or processes under MPS.

    PYTHONPATH=src python benchmarks/speed/together.py OUT [--runs 1 4 12] [--layers 50] [--tiny]

Each run takes the trainer's own recorded steps, with the sizes of a run of `kilolayer reproduce deepnet-table1`. As threads,
each has a CUDA stream. Whether NVIDIA's multi-process service has a server is asked after each measurement, while the processes
still hold the GPU, and stands beside their numbers. Every number is in OUT/together.json as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from threading import Barrier
from typing import Any

import torch
from jobs import Setting
from ours import kilolayer
from workers import versions

sys.path.insert(0, str(Path(__file__).parent.parent))

from mps import Service

WARM = 3
"""Steps until a step is replayed: one to compile, one to record, one to see that it works."""
Step = Callable[[], Any]


def sweep(layers: int, tiny: bool) -> Setting:
    """A run of Table 1: 4,096 tokens a side in short sentences."""
    if tiny:
        return Setting("translation", 2, 4, 8, dim=16, heads=2, ffn_dim=32, vocabulary=96, dropout=0.1)
    return Setting("translation", layers, 256, 16, dim=128, heads=4, ffn_dim=512, vocabulary=8192, dropout=0.1)


class Runs:
    """The runs of this process, each with a stream of its own."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.runs: list[tuple[Step, torch.cuda.Stream | None]] = []

    def add(self) -> None:
        """Make one more run, and let it take its first steps."""
        stream = torch.cuda.Stream() if self.device.type == "cuda" else None
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            step = kilolayer(self.setting, self.device)
            for _ in range(WARM):
                step()
        self.runs.append((step, stream))

    def steps(self, seconds: float) -> int:
        """The number of steps that all runs together take in this time, one thread for each."""
        start = Barrier(len(self.runs))

        def take(run: tuple[Step, torch.cuda.Stream | None]) -> int:
            step, stream = run
            taken = 0
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                start.wait()
                end = time.monotonic() + seconds
                while time.monotonic() < end:
                    step()
                    taken += 1
            return taken

        with ThreadPoolExecutor(len(self.runs)) as threads:
            return sum(threads.map(take, self.runs))


def serve(setting: Setting) -> None:
    """Answer each line `RUNS SECONDS` on stdin with the number of steps that so many runs of this process take."""
    runs = Runs(setting)
    for line in sys.stdin:
        count, seconds = line.split()
        while len(runs.runs) < int(count):
            runs.add()
        print(runs.steps(float(seconds)) if float(seconds) else 0, flush=True)


class Child:
    """A process that serves runs."""

    def __init__(self, words: Sequence[str], environment: dict[str, str]) -> None:
        command = [sys.executable, __file__, *words, "--serve"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment
        )

    def ask(self, runs: int, seconds: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{runs} {seconds}\n")
        self.process.stdin.flush()

    def answer(self) -> int:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process ended with code {self.process.wait()}")
        return int(line)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def measure(options: argparse.Namespace, words: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rate of each way to share, for each number of runs."""
    most = max(options.runs)
    children: list[Child] = []

    def rate(counts: Sequence[tuple[Child, int]]) -> float:
        for seconds in (0.0, options.seconds):  # first all get ready
            for child, runs in counts:
                child.ask(runs, seconds)
            taken = sum(child.answer() for child, _ in counts)
        return taken / options.seconds

    def start(count: int, environment: dict[str, str]) -> list[Child]:
        children.extend(Child(words, environment) for _ in range(count))
        return children

    def end() -> None:
        while children:
            children.pop().end()

    with ExitStack() as stack:
        stack.callback(end)
        (alone,) = start(1, {})
        for runs in options.runs:
            yield {"way": "threads", "runs": runs, "steps_per_s": rate([(alone, runs)])}
        end()
        start(most, {})
        for runs in options.runs:
            yield {"way": "processes", "runs": runs, "steps_per_s": rate([(child, 1) for child in children[:runs]])}
        end()
        try:
            service = Service()
        except (OSError, subprocess.SubprocessError) as error:
            yield {"way": "processes under MPS", "reason": str(error)}
            return
        stack.callback(service.stop)
        stack.callback(end)
        start(most, service.environment)
        for runs in options.runs:
            found = rate([(child, 1) for child in children[:runs]])
            yield {"way": "processes under MPS", "runs": runs, "steps_per_s": found, "servers": len(service.servers())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 4, 12])
    parser.add_argument("--layers", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    setting = sweep(options.layers, options.tiny)
    if options.serve:
        return serve(setting)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    command = f"PYTHONPATH=src python benchmarks/speed/together.py {shlex.join(sys.argv[1:])}"
    document: dict[str, Any] = {"command": command, "device": device, "versions": versions(), "setting": vars(setting)}
    document["found"] = found = []
    options.out.mkdir(parents=True, exist_ok=True)
    for each in measure(options, sys.argv[1:]):
        print(json.dumps(each), flush=True)
        found.append(each)
        (options.out / "together.json").write_text(json.dumps(document, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
