"""Draw the figure for the runs of thousand.py: losses by step, and the gradient in the encoder's first layer.

    python benchmarks/translation/draw_thousand.py

Reads thousand-*.json in this folder and writes docs/images/thousand.svg.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
SHOWN = {
    "deepnorm-500L": ("DeepNorm 500L-500L, 4e-4, eps 1e-4", "tab:blue"),
    "deepnorm-500L-slow": ("DeepNorm 500L-500L, 1e-4", "tab:cyan"),
    "deepnorm-500L-no-dropout": ("DeepNorm 500L-500L, 5e-4", "tab:orange"),
    "deepnorm-500L-fast": ("DeepNorm 500L-500L, 1e-3", "tab:red"),
    "post_ln-500L": ("Post-LN 500L-500L, 4e-4, eps 1e-4", "tab:gray"),
    "deepnorm-6L": ("DeepNorm 6L-6L, 8e-4", "tab:green"),
}


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Plot training loss as lines, validation loss as points, and the gradient on a logarithmic scale."""
    mpl.rcParams["svg.hashsalt"] = "kilolayer"  # for reproducible SVG ids
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, (label, colour) in SHOWN.items():
        left.plot(*zip(*runs[name]["train"], strict=True), color=colour, linewidth=1, label=label)
        if runs[name]["valid"]:
            left.plot(*zip(*runs[name]["valid"], strict=True), color=colour, marker="o", markersize=4, linestyle="none")
        gradients = [(row["step"], row["encoder"][0]) for row in runs[name]["gradients"]]
        right.plot(*zip(*gradients, strict=True), color=colour, marker="o", markersize=4, linewidth=1)
    left.set(xlabel="step", ylabel="loss per target token", ylim=(1.4, 9.5))
    right.set(xlabel="step", ylabel="norm of the gradient", yscale="log")
    left.set_title("Training (lines) and validation (points)", fontsize=10)
    right.set_title("Gradient of the encoder's first layer", fontsize=10)
    left.legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    runs = {name: json.loads((HERE / f"thousand-{name}.json").read_text()) for name in SHOWN}
    draw(runs, HERE.parents[1] / "docs/images/thousand.svg")


if __name__ == "__main__":
    main()
