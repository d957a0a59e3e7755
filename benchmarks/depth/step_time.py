"""Time a training step of each of several models, alone on the GPU.

Processes prepare in parallel (text, compiled layers, a recorded step) and then wait; each in turn runs its timed steps while
all others are idle.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

WARM, TIMED = 6, 40


def step_times(runs: Mapping[str, Sequence[str]], work: Path, together: int) -> dict[str, dict[str, Any]]:
    """The measurements of each of `runs`, the arguments of `kilolayer train` by name; `told` if one fails.

    together: processes that prepare at once. Their output goes to NAME.speed.log in `work`.
    """
    work.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    for first in range(0, len(runs), together):
        names = list(runs)[first : first + together]
        processes = {name: _start(runs[name], work / f"{name}.speed.log") for name in names}
        try:
            for process in processes.values():
                _answer(process)
            for name, process in processes.items():
                answer = _request_answer(process)
                found[name] = answer or {"told": (work / f"{name}.speed.log").read_text().splitlines()[-3:]}
                process.wait()
        finally:
            for process in processes.values():
                process.kill()
    return found


def _start(words: Sequence[str], log: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__)), *words]
    with log.open("w") as said:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True)


def _request_answer(process: subprocess.Popen[str]) -> dict[str, Any] | None:
    assert process.stdin is not None
    try:
        process.stdin.write("\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    return _answer(process)


def _answer(process: subprocess.Popen[str]) -> dict[str, Any] | None:
    """The next line of a process; None if it has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    return json.loads(line) if line else None


def measure(words: Sequence[str]) -> None:
    """Prepare the run that `kilolayer train` would start with these arguments, wait for a line, and time its steps."""
    began = time.monotonic()
    import torch

    from kilolayer.cli.configuration import read_tables
    from kilolayer.runs.budget import Work, budget
    from kilolayer.runs.run import Run, cache_folder, choose_precision, prepare
    from kilolayer.runs.start import read_started
    from kilolayer.training.step import Stepper
    from kilolayer.training.trainer import Trainer

    config, _ = read_started(read_tables(Path(words[0]), words[1:]))
    config = replace(config, train=replace(config.train, precision=choose_precision(config.train), layers_every=0))
    task = prepare(config, cache_folder())
    config = task.resolve(config)
    trainer = Trainer(Run(Path("not-written"), config), task)
    trainer.begin(None)
    loss, runtime = trainer.task.loss, trainer.run.runtime
    stepper = Stepper(
        trainer.model, trainer.optimizer, config.train, trainer.guard, trainer.device, _say, loss=loss, runtime=runtime
    )

    def take_step() -> float:
        started = time.perf_counter()
        stepper.step(trainer.take_batches(), 1e-6)  # reads its loss from the device, which synchronizes
        return (time.perf_counter() - started) * 1e3

    for _ in range(WARM):
        take_step()
    print(json.dumps({"ready": True}), flush=True)
    ready = time.monotonic() - began
    sys.stdin.readline()
    timed = [take_step() for _ in range(TIMED)]
    usual = config.usual_batch(None)
    cost = budget(config.model, Work(usual.rows, usual.length))
    tokens = usual.rows * usual.length
    facts = {
        "ms": median(timed),
        "ready_s": round(ready, 1),
        "tokens": tokens,
        "tokens_per_second": tokens / median(timed) * 1e3,
        "flops": cost.training_flops_per_token * tokens,
        "parameters": cost.parameters,
        "without_tables": sum(count for part, count in cost.parts.items() if part.startswith("decoder")),
        "gigabytes": round(torch.cuda.max_memory_reserved() / 2**30, 2) if trainer.device.type == "cuda" else None,
    }
    print(json.dumps(facts), flush=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    measure(sys.argv[1:])
