"""Train sparse models and dense ones with the same text, steps and active FLOPs per token.

    python benchmarks/sparse/runs.py language OUT --steps 1500 --seconds S [--systems ...]
    python benchmarks/sparse/runs.py translation OUT --steps 1500 --seconds S [--systems ...]

Runs that fit into GPU memory together start in parallel and are paused at their first line of metrics; then each has the GPU to
itself until its last validation, so that their times can be compared. A run that is out of time ends where it is. No run writes
a checkpoint, which would take 40 GB with 256 experts; after its last validation a run is ended. Writes OUT/TASK.json: loss by
step and by second (steps times the median step time), routing, norms and clipping. The language task reads
KILOLAYER_DATA/books, and the vocabulary KILOLAYER_DATA/books.model if it exists; translation reads the text prepared by
benchmarks/translation/multilingual.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

HERE = Path(__file__).parent


def experts(count: int, *more: str) -> list[str]:
    return ["--model.moe.experts", str(count), *more]


# Two experts of FFN 2048 in every second layer cost as much as FFN 3072 in all layers.
LANGUAGE = {
    "dense": ["--model.ffn_dim", "3072"],
    "16": experts(16),
    "64": experts(64),
    "256": experts(256),
    "256 plain clipping": experts(256, "--train.clip", "plain"),
    "64 top-1": experts(64, "--model.moe.top_k", "1"),
    "64 linear router": experts(64, "--model.moe.router", "linear"),
}
TRANSLATION = {
    "dense": ["--model.ffn_dim", "1536"],
    "256": experts(256),
    "256 plain clipping": experts(256, "--train.clip", "plain"),
}


GIGABYTES = {"dense": 8, "16": 14, "64": 28, "256": 64}
MEMORY = 134  # GB of GPU memory that parallel runs may take


def paths(task: str) -> list[str]:
    """The options that set the text of a task."""
    data = Path(os.environ["KILOLAYER_DATA"])
    if task == "translation":
        sys.path.insert(0, str(HERE.parent / "translation"))
        from multilingual import TEXT, encode, unpack

        unpack()
        encode([])
        return ["--data.folder", str(TEXT), "--tokenizer.path", str(TEXT / "tokenizer.model")]
    parts = [f"--text.{part}={json.dumps([str(data / 'books' / f'{part}.jsonl.xz')])}" for part in ("train", "valid", "test")]
    vocabulary = data / "books.model"
    new = ["--tokenizer.kind", "bpe", "--tokenizer.vocab_size", "16000"]
    return [*parts, *(["--tokenizer.path", str(vocabulary)] if vocabulary.exists() else new)]


class Attempt:
    """A run in a separate process; its output goes to FOLDER.log."""

    def __init__(self, task: str, name: str, options: list[str], steps: int) -> None:
        self.folder, self.steps = Path("runs") / f"sparse-{task}" / name.replace(" ", "-"), steps
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        config = [str(HERE / f"{task}.toml"), "--run", str(self.folder), "--train.steps", str(steps)]
        with self.folder.with_suffix(".log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kilolayer", "train", *config, *options], stdout=log, stderr=subprocess.STDOUT
            )

    def has(self, text: str) -> bool:
        """Whether the metrics contain this text, or the process has ended."""
        path = self.folder / "metrics.jsonl"
        return self.process.poll() is not None or (path.exists() and text in path.read_text())

    def halt(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGSTOP)

    def finish(self, end: float) -> None:
        """Continue until the last validation, then end the process."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            while time.monotonic() < end and not self.has(f'"valid", "step": {self.steps},'):
                time.sleep(0.1)
        self.end()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def start_paused(attempts: list[Attempt], end: float) -> None:
    """Start all, and pause each at its first line of metrics."""
    while attempts and time.monotonic() < end:
        ready = [attempt for attempt in attempts if attempt.has('"train", "step": ')]
        for attempt in ready:
            attempt.halt()
        attempts = [attempt for attempt in attempts if attempt not in ready]
        time.sleep(0.1)


def groups(systems: list[str]) -> Iterator[list[str]]:
    """Systems that fit into GPU memory together, in order."""
    group: list[str] = []
    for name in systems:
        if group and sum(GIGABYTES[each.split()[0]] for each in (*group, name)) > MEMORY:
            yield group
            group = []
        group.append(name)
    yield group


def describe(folder: Path) -> dict[str, Any]:
    """The measurements of a run."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in ("train", "valid", "routing")}
    if not by_kind["train"]:
        log = folder.with_suffix(".log").read_text().splitlines()
        return {"reason": " ".join(log[-4:]) if log else "it said nothing"}
    pairs = zip(by_kind["train"][1:], by_kind["train"], strict=False)
    step_s = median([(b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for b, a in pairs] or [math.nan])
    log = (folder / "log.txt").read_text().splitlines()
    return {
        "said": [line for line in log if not line.startswith("step")],
        "steps": by_kind["train"][-1]["step"],
        "seconds_per_step": step_s,
        "tokens_per_second": median(row["tokens_per_second"] for row in by_kind["train"]),
        "skipped": sum(row["skipped"] for row in by_kind["train"]),
        "clipped": sum(row["clipped"] for row in by_kind["train"]),
        "clipped_by_step": [(row["step"], row["clipped"]) for row in by_kind["train"]],
        "valid": [(row["step"], row["step"] * step_s, row["loss"], math.exp(row["loss"])) for row in by_kind["valid"]],
        "train": [(row["step"], row["nll"]) for row in by_kind["train"]],
        "routing": [_summary(row) for row in by_kind["routing"]],
    }


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    """Means over the layers, and the extreme expert loads relative to an equal share."""
    shares = [[share * len(load) for share in load] for load in row["load"]]
    means = {name: sum(row[name]) / len(row[name]) for name in ("entropy", "dropped", "temperature") if name in row}
    dead = sum(share < 0.01 for load in shares for share in load)
    extremes = {"busiest": max(map(max, shares)), "idlest": min(map(min, shares)), "dead": dead}
    return {"step": row["step"], "dense_norm": row["dense_norm"], "expert_norm": row["expert_norm"], **means, **extremes}


def main() -> None:
    parser = argparse.ArgumentParser(description="Sparse models in training.", allow_abbrev=False)
    parser.add_argument("task", choices=("language", "translation"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seconds", type=float, default=550)
    parser.add_argument("--systems", nargs="+")
    chosen, others = parser.parse_known_args()
    systems = LANGUAGE if chosen.task == "language" else TRANSLATION
    wanted = chosen.systems or list(systems)
    if unknown := set(wanted) - set(systems):
        parser.error(f"no system {', '.join(sorted(unknown))}; there are {', '.join(systems)}")
    text = paths(chosen.task)
    end = time.monotonic() + chosen.seconds
    chosen.out.mkdir(parents=True, exist_ok=True)
    words = ["OUT" if Path(word) == chosen.out else word for word in sys.argv[1:]]
    document: dict[str, Any] = {
        "command": " ".join(["python benchmarks/sparse/runs.py", *words]),
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "runs": {},
    }
    for group in groups(wanted):
        attempts = {name: Attempt(chosen.task, name, [*text, *systems[name], *others], chosen.steps) for name in group}
        try:
            start_paused(list(attempts.values()), end)
            for name, attempt in attempts.items():
                attempt.finish(end)
                found = document["runs"][name] = describe(attempt.folder) | {"options": systems[name]}
                (chosen.out / f"{chosen.task}.json").write_text(json.dumps(document, indent=1) + "\n")
                shown = {key: found.get(key) for key in ("steps", "seconds_per_step", "clipped", "skipped", "reason")}
                print(name, shown, found.get("valid", [])[-1:], flush=True)
        finally:
            for attempt in attempts.values():
                attempt.end()


if __name__ == "__main__":
    main()
