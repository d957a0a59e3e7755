"""Stands for `kilolayer train` where many processes are wanted soon: it leaves what a run leaves, and trains nothing.

What happens is told by the configuration: `train.lr` above 1 diverges, `train.seed` 13 breaks, 14 has no memory unless it is
alone, 15 is refused, 16 has a stack that is dying at its second step. `train.accumulate` of 8 and more
breaks before the first step. A step takes STEP seconds; events are noted in the file that FAKE_EVENTS names.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
import tomllib
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

STEP = 0.05
COMPILER = """Traceback (most recent call last):
  File "/somewhere/train.py", line 12, in <module>
    step(batch)
torch._dynamo.exc.InternalTorchDynamoError: AssertionError: 7 layers

from user code:
   File "/somewhere/layer.py", line 3, in forward
    assert x

Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace (please do this especially if you're reporting a bug to PyTorch)."""


def note(event: str, folder: Path) -> None:
    entry = {"event": event, "run": folder.name, "process": os.getpid(), "time": time.time()}
    entry |= {"gpu": os.environ.get("CUDA_VISIBLE_DEVICES"), "threads": os.environ.get("OMP_NUM_THREADS")}
    with open(os.environ["FAKE_EVENTS"], "a") as file:
        file.write(json.dumps(entry) + "\n")


def end(code: int, *lines: str) -> NoReturn:
    print(*lines, sep="\n", flush=True)
    os._exit(code)


def main(words: list[str]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until there is a handler
    resume = words[0] == "--resume"
    folder = Path(words[1] if resume else words[2])
    folder.mkdir(parents=True, exist_ok=True)
    time.sleep(2 * STEP)
    lock = open(folder / "lock", "a+")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        end(2, f"kilolayer: the folder is in use by process {lock.read()}", f"  {folder}", "  wait for it")
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    note("resumed" if resume else "started", folder)
    text = (folder / "config.toml").read_text() if resume else Path(words[0]).read_text()
    config: dict[str, Any] = tomllib.loads(text)
    seed = config["train"].get("seed", 1)
    if seed == 15:
        end(2, "kilolayer: the text is empty", "  in train.txt", "  give files with text")
    if not resume:
        (folder / "config.toml").write_text(text)
    train(folder, config, seed)


def train(folder: Path, config: dict[str, Any], seed: int) -> None:
    state = folder / "step"
    step = int(state.read_text()) if state.exists() else 0

    def stop(number: int, _: FrameType | None) -> None:
        state.write_text(str(step))
        note("stopped", folder)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    if config["train"].get("accumulate", 1) >= 8:
        end(1, COMPILER.replace("7", str(config["train"]["accumulate"])))
    while step < config["train"]["steps"]:
        time.sleep(STEP)
        step += 1
        rows = [{"kind": "train", "step": step, "nll": 5.0 / step, "seconds": step * STEP}]
        rows += [{"kind": "valid", "step": step, "loss": 5.0 / step + config["train"]["lr"]}]
        if seed == 16 and step == 2:
            rows += [{"kind": "event", "step": step, "fading": True, "text": "the gradient of the encoder's first layers ..."}]
            if config["train"].get("stop_when_dead"):
                rows += [{"kind": "event", "step": step, "ended_by": "encoder", "text": "..."}]
        if config["train"]["lr"] > 1:
            step += 9
            text = "step {} skipped: the gradient is not finite"
            rows = [{"kind": "event", "step": each, "text": text.format(each)} for each in range(step - 9, step + 1)]
        with open(folder / "metrics.jsonl", "a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
        if seed == 16 and step == 2 and config["train"].get("stop_when_dead"):
            end(2, "kilolayer: train.stop_when_dead ends the run", f"  step {step}")
        if config["train"]["lr"] > 1:
            end(2, "kilolayer: 10 steps in a row were not finite", f"  step {step}", "  lower train.lr")
        if seed == 13:
            end(1, "Traceback (most recent call last):", "ZeroDivisionError: division by zero")
        if seed == 14 and others_run(folder):
            end(2, "kilolayer: there is not enough memory", "  CUDA out of memory", "  lower batches.tokens")
    note("finished", folder)
    (folder / "scores.json").write_text(json.dumps({"weights": {"chosen": "best", "steps": [step], "passed_over": []}}))


def others_run(folder: Path) -> bool:
    for other in folder.parent.iterdir():
        if other != folder and (other / "lock").exists():
            with open(other / "lock", "a+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
