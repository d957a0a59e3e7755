"""Comparing systems by many training runs side by side on one GPU: choose on the validation part, then score three seeds.

    select: every system at its learning rates and warm-ups, validation loss alone
    final:  each system as chosen, three seeds, scored once on the test part

The runs wait in a queue, --parallel at once; at the limit of --seconds those under way stop with a checkpoint, and those that
wait are left out. Options of `kilolayer train` (--model.dim 16) go to all runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class System:
    """What is compared: the options that make it, and the learning rates and warm-ups that it may choose from."""

    options: list[str]
    rates: Sequence[float]
    warmups: Sequence[int]


@dataclass(frozen=True)
class Benchmark:
    """Systems on one corpus; NAME.toml holds what they share."""

    name: str
    data: str
    """Folder in KILOLAYER_DATA."""
    systems: dict[str, System]
    """The slowest first: they should not be the last ones in the queue."""
    final: list[str]
    """Options of the runs that are scored."""
    score: Callable[[Path], dict[str, Any]] = lambda run: {}
    """More scores of a finished run."""

    def select(self, chosen: argparse.Namespace) -> dict[str, list[str]]:
        """The runs of every system at every learning rate and warm-up."""
        return {
            f"{name}-lr{lr:g}-warm{warmup}": [*system.options, "--train.lr", str(lr), "--train.warmup_steps", str(warmup)]
            for name, system in self.systems.items()
            for lr, warmup in product(system.rates, system.warmups)
            if name in chosen.systems and lr in (chosen.rates or [lr]) and warmup in (chosen.warmups or [warmup])
        }

    def seeds(self, chosen: argparse.Namespace) -> dict[str, list[str]]:
        """The runs of each system, with the options of its lowest validation loss, at every seed."""
        results = {}
        for path in chosen.selected:
            found = json.loads(path.read_text())["runs"]
            results |= {name: run for name, run in found.items() if run["valid"]}
        runs = {}
        for system in chosen.systems:
            own = {name: run for name, run in results.items() if name.startswith(f"{system}-lr")}
            if not own:
                raise SystemExit(f"no run of {system} is in {', '.join(map(str, chosen.selected))}: run select first")
            best = min(own.values(), key=lambda run: min(loss for _, loss, _ in run["valid"]))["options"]
            options = best[: best.index("--train.steps")]
            runs |= {f"{system}-seed{seed}": [*options, *self.final, "--train.seed", str(seed)] for seed in SEEDS}
        return runs

    def start(self, name: str, options: list[str], work: Path) -> subprocess.Popen[bytes]:
        """One training run in the background, its output in a log."""
        command = [sys.executable, "-m", "kilolayer", "train", str(HERE / f"{self.name}.toml"), "--run", str(work / name)]
        data = ["--data.folder", str(Path(os.environ["KILOLAYER_DATA"]) / self.data)]
        with (work / f"{name}.log").open("wb") as log:
            return subprocess.Popen([*command, *data, *options], stdout=log, stderr=subprocess.STDOUT)

    def run_all(self, runs: dict[str, list[str]], work: Path, seconds: float, parallel: int) -> dict[str, Any]:
        """Run the queue until the limit, and return what each run measured."""
        work.mkdir(parents=True)
        end = time.monotonic() + seconds
        queue, processes = list(runs), []
        while time.monotonic() < end and (queue or any(process.poll() is None for process in processes)):
            running = sum(process.poll() is None for process in processes)
            # The first alone for a moment: it trains the vocabulary that the others find in the cache.
            alone = running and not (work / next(iter(runs)) / "config.toml").exists()
            if queue and running < parallel and not alone:
                name = queue.pop(0)
                processes.append(self.start(name, runs[name], work))
            else:
                time.sleep(0.5)
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=60)
        return {name: self.read(work / name) | {"options": options} for name, options in runs.items()}

    def read(self, folder: Path) -> dict[str, Any]:
        """The validations, the speed and the scores of a run."""
        path = folder / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        valid = [(row["step"], row["loss"], row.get("bleu")) for row in rows if row["kind"] == "valid"]
        train = [row for row in rows if row["kind"] == "train"]
        found = folder / "scores.json"
        scores = json.loads(found.read_text()).get("test") if found.exists() else None
        return {
            "valid": valid,
            "steps": train[-1]["step"] if train else 0,
            "seconds": train[-1]["seconds"] if train else 0.0,
            "skipped": sum(row["skipped"] for row in train),
            "scores": scores | self.score(folder) if scores else None,
        }

    def main(self, description: str, steps: int) -> None:
        """The command line of a benchmark."""
        parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
        parser.add_argument("stage", choices=("select", "final"))
        parser.add_argument("out", type=Path)
        parser.add_argument("--steps", type=int, default=steps)
        parser.add_argument("--seconds", type=float, default=500)
        parser.add_argument("--parallel", type=int, default=16)
        parser.add_argument("--systems", nargs="+", choices=self.systems, default=list(self.systems))
        parser.add_argument("--rates", nargs="+", type=float, help="of select: these alone")
        parser.add_argument("--warmups", nargs="+", type=int, help="of select: these alone")
        parser.add_argument(
            "--selected", nargs="+", type=Path, default=[HERE / f"{self.name}-select.json"], help="of final: what select wrote"
        )
        chosen, others = parser.parse_known_args()
        runs = self.select(chosen) if chosen.stage == "select" else self.seeds(chosen)
        length = ["--train.steps", str(chosen.steps)]
        runs = {name: [*options, *length, *others] for name, options in runs.items()}
        work = Path("runs") / f"{self.name}-{chosen.stage}"
        shutil.rmtree(work, ignore_errors=True)
        results = self.run_all(runs, work, chosen.seconds, chosen.parallel)
        chosen.out.mkdir(parents=True, exist_ok=True)
        words = ["OUT" if Path(word) == chosen.out else word for word in sys.argv[1:]]
        command = " ".join(["python", f"benchmarks/translation/{self.name}.py", *words])
        document = {"command": command, "hardware": _hardware(), "runs": results}
        (chosen.out / f"{self.name}-{chosen.stage}.json").write_text(json.dumps(document, indent=1) + "\n")
        for path in work.glob("*/test.*.txt"):
            shutil.copy(path, chosen.out / f"{self.name}-{path.parent.name}.txt")
        for name, result in results.items():
            if not result["steps"]:
                log = work / f"{name}.log"
                print(name, "has not trained:", *(log.read_text().splitlines()[-1:] if log.exists() else ["no time was left"]))
                continue
            lowest = min((loss for _, loss, _ in result["valid"]), default=None)
            scores = {key: round(score["value"], 2) for key, score in (result["scores"] or {}).items()}
            print(name, "valid", lowest, "steps", result["steps"], "seconds", round(result["seconds"]), scores)


def _hardware() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
