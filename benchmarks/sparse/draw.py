"""Draw the figure for the language models of runs.py: validation perplexity by step and by second.

    python benchmarks/sparse/draw.py

Reads language.json in this folder and writes docs/images/sparse.svg.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
SHOWN = {"dense": "dense", "16": "16 experts", "64": "64 experts", "256": "256 experts"}


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Plot the same points by step and by second; perplexity has a logarithmic scale."""
    mpl.rcParams["svg.hashsalt"] = "kilolayer"  # for reproducible SVG ids
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
    for name, label in SHOWN.items():
        steps, seconds, _, perplexities = zip(*runs[name]["valid"], strict=True)
        left.plot(steps, perplexities, marker="o", markersize=4, linewidth=1, label=label)
        right.plot(seconds, perplexities, marker="o", markersize=4, linewidth=1)
    left.set(xlabel="step", ylabel="validation perplexity", yscale="log")
    right.set(xlabel="seconds of training")
    ticks = [100, 120, 150, 200, 250]
    left.set_yticks(ticks, [str(tick) for tick in ticks])
    left.minorticks_off()
    left.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    draw(json.loads((HERE / "language.json").read_text())["runs"], HERE.parents[1] / "docs/images/sparse.svg")


if __name__ == "__main__":
    main()
