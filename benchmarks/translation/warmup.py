"""When does the encoder of a deep DeepNorm model keep training? 48L-48L on a CPU: learning rates, warm-ups, Adam's eps.

    python benchmarks/translation/warmup.py OUT    # about 0.9 s per step on one core

Writes OUT/warmup.json: both losses by step, and the gradient in the first, middle and last layer of each side. Runs that are
already in the file are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from thousand import describe

HERE = Path(__file__).parent
SYSTEMS = {  # peak learning rate, warm-up steps, steps, eps
    "2e-3-after-200": ("2e-3", 200, 700, "1e-8"),
    "5e-4-after-200": ("5e-4", 200, 700, "1e-8"),
    "8e-4-after-400": ("8e-4", 400, 1000, "1e-8"),
    "1.6e-3-after-1200": ("1.6e-3", 1200, 1500, "1e-8"),
    "2e-3-after-800": ("2e-3", 800, 1000, "1e-8"),
    "2e-3-after-200-eps-1e-4": ("2e-3", 200, 700, "1e-4"),
    "4e-3-after-200-eps-4e-4": ("4e-3", 200, 700, "4e-4"),
}


def train(folder: Path, lr: str, warmup: int, steps: int, eps: str) -> None:
    numbers = {"lr": lr, "warmup_steps": warmup, "steps": steps, "eps": eps, "device": "cpu"}
    options = [word for name, value in numbers.items() for word in (f"--train.{name}", str(value))]
    data = ["--data.folder", str(Path(os.environ["KILOLAYER_DATA"]) / "multi30k")]
    command = [sys.executable, "-m", "kilolayer", "train", str(HERE / "warmup.toml"), "--run", str(folder), *data, *options]
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learning rates and warm-ups at 48 layers per side.")
    parser.add_argument("out", type=Path)
    chosen = parser.parse_args()
    runs = Path("runs") / "warmup"
    for name, options in SYSTEMS.items():
        if not (runs / name).exists():
            train(runs / name, *options)
    chosen.out.mkdir(parents=True, exist_ok=True)
    found = {name: describe(runs / name) for name in SYSTEMS}
    document = {"command": "python benchmarks/translation/warmup.py OUT", "hardware": "CPU, one core per run", "runs": found}
    (chosen.out / "warmup.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
