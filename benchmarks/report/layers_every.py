"""Compare the time of a training step that measures every layer with one that does not, on the CPU.

    python benchmarks/report/layers_every.py benchmarks/report/layers_every.json

The two kinds of step alternate on the same batches. `share` is what the measurements add to the time of a whole run of `steps`
steps at the default of `train.layers_every`, including the line in metrics.jsonl. The committed file was measured while other
work ran on the machine, so its times only serve to compare the two kinds of step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from kilolayer.config import build, load, merge
from kilolayer.data.grammar import write_corpus
from kilolayer.runs.metrics import Metrics
from kilolayer.runs.run import Run, cache_folder, prepare
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.registry import EMBEDDED
from kilolayer.training.norms import LayerNorms
from kilolayer.training.step import Stepper
from kilolayer.training.trainer import Trainer

DEEP = {"encoder_layers": 100, "decoder_layers": 100, "dim": 32, "heads": 2, "ffn_dim": 64}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "quickstart, 18L-18L, dim 64": (60, {}),
    "100L-100L, dim 32": (20, {"model": DEEP}),
    "100L-100L, dim 32, two threads": (20, {"model": DEEP, "train": {"threads": 2}}),
}


def measure(name: str, pairs: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Median times of `pairs` steps of each kind."""
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        write_corpus(folder / "data")
        config = build(RunConfig, merge(load(EMBEDDED), merge({"data": {"folder": str(folder / "data")}}, changes)))
        task = prepare(config, cache_folder())
        config = task.resolve(config)
        trainer = Trainer(Run(folder, config), task)
        trainer.begin(None)
        metrics = Metrics(folder, 0)
        plain, measured = _alternate(trainer, metrics, pairs)
        line = len(metrics.path.read_text(encoding="utf-8").splitlines()[-1])
    extra = median(b - a for a, b in zip(plain, measured, strict=True))
    measurements = sum(config.train.measures_layers(step) for step in range(1, config.train.steps + 1))
    return {
        "case": name,
        "steps_of_each_kind": pairs,
        "plain_ms": round(1e3 * median(plain), 2),
        "measured_ms": round(1e3 * median(measured), 2),
        "extra": round(extra / median(plain), 4),
        "bytes_a_line": line,
        "steps": config.train.steps,
        "measurements": measurements,
        "share": round(extra / median(plain) * measurements / config.train.steps, 5),
    }


def _alternate(trainer: Trainer, metrics: Metrics, pairs: int) -> tuple[list[float], list[float]]:
    """Seconds of plain and of measured steps. A pair reads the same batches; every second pair begins with the measured
    step."""
    config = trainer.config
    stepper = Stepper(trainer.model, trainer.optimizer, config, trainer.guard, trainer.device, runtime=trainer.run.runtime)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(-3, pairs):
        batches = trainer.take_batches()
        for measures in (False, True) if pair % 2 else (True, False):
            start = time.perf_counter()
            norms = LayerNorms() if measures else None
            stepper.step(batches, 1e-5, norms)
            if norms is not None:
                metrics.write("layers", pair, **norms.rounded())
            if pair >= 0:
                seconds[measures].append(time.perf_counter() - start)
    return seconds[False], seconds[True]


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of measuring the layers.")
    parser.add_argument("results", type=Path)
    options = parser.parse_args()
    result = {
        "command": "python benchmarks/report/layers_every.py benchmarks/report/layers_every.json",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()}), one thread unless stated otherwise",
        "seed": 1,
        "cases": [measure(name, *case) for name, case in CASES.items()],
    }
    options.results.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["cases"], indent=1))


if __name__ == "__main__":
    main()
