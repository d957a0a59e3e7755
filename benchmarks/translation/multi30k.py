"""Multi30k English-German: Post-LN 6L-6L and DeepNorm 18L-18L, chosen alike on val, then three seeds on test_2016_flickr.

    python benchmarks/translation/multi30k.py select OUT     # learning rates x warm-ups, validation loss alone
    python benchmarks/translation/multi30k.py final OUT      # the chosen ones, three seeds, scored once on the test part

All runs of a stage go side by side on one GPU. OUT gets results.json, and each run's metrics and translations.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SYSTEMS = {"post_ln-6L": ["--model.recipe", "post_ln", "--model.layers", "6"], "deepnorm-18L": ["--model.layers", "18"]}
RATES, WARMUPS = (2e-4, 4e-4, 8e-4), (400, 1200)


def start(name: str, options: list[str], work: Path) -> subprocess.Popen[bytes]:
    """One training run in the background, its output in a log."""
    command = [sys.executable, "-m", "kilolayer", "train", str(HERE / "multi30k.toml"), "--run", str(work / name)]
    data = ["--data.folder", str(Path(os.environ["KILOLAYER_DATA"]) / "multi30k")]
    with (work / f"{name}.log").open("wb") as log:
        return subprocess.Popen([*command, *data, *options], stdout=log, stderr=subprocess.STDOUT)


def run_all(runs: dict[str, list[str]], work: Path, seconds: float) -> dict[str, Any]:
    """Run side by side, stop at the limit (each writes a checkpoint then), and return what each measured."""
    work.mkdir(parents=True, exist_ok=True)
    first, *others = runs.items()
    # The first alone for a moment: it trains the vocabulary that the others find in the cache.
    processes = {first[0]: start(*first, work)}
    time.sleep(20)
    processes |= {name: start(name, options, work) for name, options in others}
    end = time.monotonic() + seconds
    for process in processes.values():
        try:
            process.wait(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(timeout=60)
    return {name: read(work / name) | {"options": runs[name]} for name in runs}


def read(folder: Path) -> dict[str, Any]:
    """The validations, the speed and the scores of a run."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    valid = [(row["step"], row["loss"], row.get("bleu")) for row in rows if row["kind"] == "valid"]
    train = [row for row in rows if row["kind"] == "train"]
    scores = folder / "scores.json"
    return {
        "valid": valid,
        "steps": train[-1]["step"] if train else 0,
        "seconds": train[-1]["seconds"] if train else 0.0,
        "skipped": sum(row["skipped"] for row in train),
        "scores": json.loads(scores.read_text()).get("test") if scores.exists() else None,
    }


def select(steps: int) -> dict[str, list[str]]:
    """Every system at every learning rate and warm-up."""
    grid = product(SYSTEMS.items(), RATES, WARMUPS)
    length = ["--train.steps", str(steps)]
    return {
        f"{name}-lr{lr:g}-warm{warmup}": [*options, "--train.lr", str(lr), "--train.warmup_steps", str(warmup), *length]
        for (name, options), lr, warmup in grid
    }


def final(chosen: dict[str, list[str]], steps: int) -> dict[str, list[str]]:
    """Three seeds of each chosen system, scored on the test part."""
    length = ["--train.steps", str(steps), "--train.average", "3", "--data.test", "test_2016_flickr"]
    return {
        f"{name}-seed{seed}": [*options, *length, "--train.seed", str(seed)]
        for name, options in chosen.items()
        for seed in (1, 2, 3)
    }


def choose(results: dict[str, Any]) -> dict[str, list[str]]:
    """For each system the options with the lowest validation loss."""
    chosen = {}
    for system in SYSTEMS:
        own = {name: result for name, result in results.items() if name.startswith(system) and result["valid"]}
        best = min(own, key=lambda name: min(loss for _, loss, _ in own[name]["valid"]))
        options = own[best]["options"]
        chosen[system] = options[: options.index("--train.steps")]
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description="Multi30k, two systems.")
    parser.add_argument("stage", choices=("select", "final"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seconds", type=float, default=500)
    options = parser.parse_args()
    work = Path("runs") / f"multi30k-{options.stage}"
    shutil.rmtree(work, ignore_errors=True)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.stage == "select":
        runs = select(options.steps)
    else:
        runs = final(choose(json.loads((HERE / "multi30k-select.json").read_text())["runs"]), options.steps)
    results = run_all(runs, work, options.seconds)
    document = {"command": f"python benchmarks/translation/multi30k.py {options.stage} OUT --steps {options.steps}"}
    document |= {"hardware": _hardware(), "runs": results}
    (options.out / f"multi30k-{options.stage}.json").write_text(json.dumps(document, indent=1) + "\n")
    for path in work.glob("*/test.*.txt"):
        shutil.copy(path, options.out / f"multi30k-{path.parent.name}.txt")
    for name, result in results.items():
        lowest = min((loss for _, loss, _ in result["valid"]), default=None)
        bleu = (result["scores"] or {}).get("bleu", {}).get("value")
        print(name, "valid", lowest, "BLEU", bleu, "steps", result["steps"], "seconds", round(result["seconds"]))


def _hardware() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


if __name__ == "__main__":
    main()
