"""Many training runs side by side on one GPU, as commands that wait in a queue.

At the limit of time those under way stop with a checkpoint, and those that wait are left out. A run that has its scores is not
made again, and one that was stopped goes on, so the same command may be given twice.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def run_queue(
    runs: Mapping[str, Sequence[str]], work: Path, seconds: float, parallel: int, environment: Mapping[str, str] | None = None
) -> None:
    """Train each of `runs`: the words behind `kilolayer train` by the name of a folder in `work`."""
    work.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    queue = [name for name in runs if not (work / name / "scores.json").exists()]
    processes: dict[str, subprocess.Popen[bytes]] = {}
    first = queue[0] if queue else ""
    while time.monotonic() < end and (queue or any(process.poll() is None for process in processes.values())):
        running = sum(process.poll() is None for process in processes.values())
        # The first alone for a moment: it trains the vocabulary that the others find in the cache.
        alone = running and not (work / first / "config.toml").exists()
        if queue and running < parallel and not alone:
            name = queue.pop(0)
            processes[name] = _start(name, runs[name], work, environment)
        else:
            time.sleep(0.2)
    for process in processes.values():
        process.terminate()
    for process in processes.values():
        process.wait(timeout=60)


def _start(name: str, words: Sequence[str], work: Path, environment: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    began = (work / name / "config.toml").exists()
    words = ["--resume", str(work / name)] if began else [*words, "--run", str(work / name)]
    with (work / f"{name}.log").open("ab") as log:
        command = [sys.executable, "-m", "kilolayer", "train", *words]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})})


def read_run(folder: Path) -> dict[str, Any]:
    """Validations, the last training row, skipped steps, scores; what went wrong, where nothing was trained."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    train = [row for row in rows if row["kind"] == "train"]
    if not train:
        log = folder.with_name(f"{folder.name}.log")
        return {"steps": 0, "told": log.read_text().splitlines()[-3:] if log.exists() else ["no time was left"]}
    scores = folder / "scores.json"
    valid = [{key: value for key, value in row.items() if key != "kind"} for row in rows if row["kind"] == "valid"]
    return {
        "steps": train[-1]["step"],
        "seconds": round(train[-1]["seconds"], 1),
        "loss": train[-1]["nll"],
        "skipped": sum(row["skipped"] for row in train),
        "valid": valid,
        "scores": json.loads(scores.read_text()).get("test") if scores.exists() else None,
    }


def hardware() -> str:
    """The device in words."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
