"""Train a thousand layers: 500L-500L DeepNorm on Multi30k, stopped once and resumed, against 6L-6L and 500L-500L Post-LN.

    python benchmarks/translation/thousand.py SYSTEM OUT --seconds S [--train.lr ...]    # starts or resumes

A run that is out of time stops with a checkpoint in runs/thousand/SYSTEM, and the same command continues it; with --discard it
stops without a checkpoint, which takes 11 GB at this depth. Writes OUT/thousand-SYSTEM.json: both losses by step, time, skipped
steps, gradients by layer, and the run's messages, such as where it was resumed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
# The learning rate that was best at 6 and 18 layers (multi30k-select.json), with Adam's usual eps.
SHALLOW = ["--train.lr", "8e-4", "--train.warmup_steps", "1000", "--train.eps", "1e-8"]
SYSTEMS = {
    "deepnorm-500L": ["--model.recipe", "deepnorm", "--model.layers", "500"],
    "deepnorm-500L-bf16": ["--model.recipe", "deepnorm", "--model.layers", "500", "--train.residual", "bf16"],
    "post_ln-500L": ["--model.recipe", "post_ln", "--model.layers", "500"],
    "deepnorm-6L": ["--model.recipe", "deepnorm", "--model.layers", "6", *SHALLOW],
    "post_ln-6L": ["--model.recipe", "post_ln", "--model.layers", "6", *SHALLOW],
}


def train(system: str, folder: Path, seconds: float, options: list[str], end: signal.Signals) -> int:
    """Train for a given time, then send the signal; returns the run's exit code, 143 if it was stopped with a checkpoint."""
    data = ["--data.folder", str(Path(os.environ["KILOLAYER_DATA"]) / "multi30k")]
    new = [str(HERE / "thousand.toml"), "--run", str(folder), *data, *SYSTEMS[system], *options]
    arguments = ["--resume", str(folder)] if folder.exists() else new
    with subprocess.Popen([sys.executable, "-m", "kilolayer", "train", *arguments]) as process:
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(end)
            return process.wait()


def describe(folder: Path) -> dict[str, Any]:
    """The measurements of the run so far."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["kind"] == "train"]
    log = (folder / "log.txt").read_text().splitlines()
    return {
        "steps": trained[-1]["step"],
        "seconds": round(trained[-1]["seconds"], 1),
        "skipped": sum(row["skipped"] for row in trained),
        "clipped": sum(row["clipped"] for row in trained),
        "said": [line for line in log if not line.startswith("step")],
        "train": [(row["step"], row["nll"]) for row in trained],
        "valid": [(row["step"], row["loss"]) for row in rows if row["kind"] == "valid"],
        "seconds_by_step": [(row["step"], round(row["seconds"], 1)) for row in trained],
        "gradients": [_gradients(row) for row in rows if row["kind"] == "layers"],
    }


def _gradients(row: dict[str, Any]) -> dict[str, Any]:
    """The gradient norm in the first, middle and last layer of each side, and the ratio of the largest to the smallest of
    all."""
    few = {side: [norms[0], norms[len(norms) // 2], norms[-1]] for side, norms in row["gradient"].items()}
    spread = {kind: {side: _spread(norms) for side, norms in row[kind].items()} for kind in ("gradient", "update")}
    return {"step": row["step"], **few, "spread": spread}


def _spread(norms: list[float]) -> float | None:
    return round(max(norms) / min(norms), 3) if min(norms) > 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description="A thousand layers.", allow_abbrev=False)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--discard", action="store_true")
    chosen, options = parser.parse_known_args()
    folder = Path("runs") / "thousand" / chosen.system
    code = train(chosen.system, folder, chosen.seconds, options, signal.SIGKILL if chosen.discard else signal.SIGTERM)
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    command = " ".join(["python benchmarks/translation/thousand.py", chosen.system, "OUT", *sys.argv[3:]])
    document = {"command": command, "hardware": hardware, "exit": code, **describe(folder)}
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / f"thousand-{chosen.system}.json").write_text(json.dumps(document, indent=1) + "\n")
    print({name: document[name] for name in ("steps", "seconds", "skipped", "said", "exit")}, document["valid"][-1:])


if __name__ == "__main__":
    main()
