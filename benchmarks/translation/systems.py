"""Compare systems on one corpus: tuned on the validation set, then three seeds scored once on the test set.

    select: every system at its learning rates and warm-ups, validation loss only
    final:  each system with its best settings, three seeds

Each stage is a comparison. Options of `kilolayer train` (--model.dim 16) apply to all runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from single_runs import Setting, hardware, row_of, train_all  # noqa: E402

from kilolayer.compare.result import Result  # noqa: E402

SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class System:
    """A system to compare: its options, and the learning rates and warm-ups to choose from."""

    options: Setting
    rates: Sequence[float]
    warmups: Sequence[int]

    def at(self, rate: float, warmup: int) -> dict[str, Any]:
        return {**self.options, "train.lr": rate, "train.warmup_steps": warmup}


@dataclass(frozen=True)
class Benchmark:
    """Systems on one corpus; NAME.toml holds what they share."""

    name: str
    data: str
    """Folder in KILOLAYER_DATA."""
    systems: dict[str, System]
    final: Setting
    """Options of the runs that are scored."""
    score: Callable[[Path], dict[str, Any]] = lambda run: {}
    """Computes further scores of a finished run."""

    def select(self, chosen: argparse.Namespace) -> dict[str, Setting]:
        """The runs of every system at every learning rate and warm-up."""
        return {
            f"{name}-lr{lr:g}-warm{warmup}": system.at(lr, warmup)
            for name, system in self.systems.items()
            for lr, warmup in product(system.rates, system.warmups)
            if name in chosen.systems and lr in (chosen.rates or [lr]) and warmup in (chosen.warmups or [warmup])
        }

    def seeds(self, chosen: argparse.Namespace) -> dict[str, Setting]:
        """The runs of each system for every seed, at the learning rate and warm-up of its lowest validation loss."""
        losses: dict[str, float] = {}
        for path in chosen.selected:
            found = json.loads(path.read_text())["runs"]
            losses |= {name: min(loss for _, loss, _ in run["valid"]) for name, run in found.items() if run["valid"]}
        runs: dict[str, Setting] = {}
        for name in chosen.systems:
            system = self.systems[name]
            tried = {
                (lr, warmup): losses.get(f"{name}-lr{lr:g}-warm{warmup}") for lr in system.rates for warmup in system.warmups
            }
            known = {setting: loss for setting, loss in tried.items() if loss is not None}
            if not known:
                raise SystemExit(f"no run of {name} is in {', '.join(map(str, chosen.selected))}: run select first")
            best = system.at(*min(known, key=lambda setting: known[setting]))
            runs |= {f"{name}-seed{seed}": {**best, "train.seed": seed} for seed in SEEDS}
        return runs

    def main(self, description: str, steps: int) -> None:
        """The command line of a benchmark."""
        parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
        parser.add_argument("stage", choices=("select", "final"))
        parser.add_argument("out", type=Path)
        parser.add_argument("--steps", type=int, default=steps)
        parser.add_argument("--seconds", type=float, default=500)
        parser.add_argument("--parallel", type=int, default=16)
        parser.add_argument("--systems", nargs="+", choices=self.systems, default=list(self.systems))
        parser.add_argument("--rates", nargs="+", type=float, help="for select: only these")
        parser.add_argument("--warmups", nargs="+", type=int, help="for select: only these")
        parser.add_argument(
            "--selected", nargs="+", type=Path, default=[HERE / f"{self.name}-select.json"], help="for final: what select wrote"
        )
        chosen, others = parser.parse_known_args()
        selecting = chosen.stage == "select"
        settings = self.select(chosen) if selecting else self.seeds(chosen)
        data = Path(os.environ["KILOLAYER_DATA"]) / self.data
        options = {"data.folder": str(data), "train.steps": chosen.steps, **({} if selecting else self.final)}
        work, config = Path("runs") / f"{self.name}-{chosen.stage}", HERE / f"{self.name}.toml"
        results = train_all(work, config, settings, chosen.seconds, chosen.parallel, options, others)
        chosen.out.mkdir(parents=True, exist_ok=True)
        words = ["OUT" if Path(word) == chosen.out else word for word in sys.argv[1:]]
        command = " ".join(["python", f"benchmarks/translation/{self.name}.py", *words])
        rows = {name: self._row(result) for name, result in results.items()}
        document = {"command": command, "hardware": hardware(), "runs": rows}
        (chosen.out / f"{self.name}-{chosen.stage}.json").write_text(json.dumps(document, indent=1) + "\n")
        for name, result in results.items():
            for path in result.folder.glob("test.*.txt"):
                shutil.copy(path, chosen.out / f"{self.name}-{name}.txt")
            lowest = min((loss for _, loss, _ in rows[name]["valid"]), default=None)
            scores = {key: round(score["value"], 2) for key, score in (rows[name]["scores"] or {}).items()}
            print(name, rows[name]["outcome"], "valid", lowest, scores)

    def _row(self, result: Result) -> dict[str, Any]:
        row = {"seconds": 0.0, "skipped": 0, "scores": None, **row_of(result), "options": result.options}
        row["valid"] = [(each["step"], each["loss"], each.get("bleu")) for each in row["valid"]]
        return row | {"scores": row["scores"] | self.score(result.folder) if row["scores"] else None}
