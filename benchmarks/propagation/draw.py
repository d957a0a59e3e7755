"""Draw the figure and write the table of benchmarks/propagation.

    python benchmarks/propagation/draw.py benchmarks/propagation/results.json

Writes docs/images/propagation.svg and benchmarks/propagation/table.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
SHOWN = {"deepnorm": "DeepNorm", "sub_ln": "Sub-LN", "pre_ln": "Pre-LN", "post_ln": "Post-LN"}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot the gradient by layer at 1,000 layers, and the relative update by depth."""
    mpl.rcParams["svg.hashsalt"] = "kilolayer"  # for reproducible SVG ids
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    depths = sorted({row["layers"] for row in rows if "updates" in row})
    for recipe, label in SHOWN.items():
        gradients = next(row["gradients_of_seed_0"] for row in rows if row["recipe"] == recipe and row["layers"] == 1000)
        left.plot(range(1, 1001), [norm / gradients[-1] for norm in gradients], label=label, linewidth=1)
        by_depth = {row["layers"]: row["updates"] for row in rows if row["recipe"] == recipe and "updates" in row}
        updates = [by_depth[depth] for depth in depths]
        right.plot(depths, [sum(runs) / len(runs) for runs in updates], marker="o", label=label)
        right.fill_between(depths, [min(runs) for runs in updates], [max(runs) for runs in updates], alpha=0.2)
    left.set(yscale="log", ylim=(1e-8, 1e2), xlabel="layer of 1,000, from the input", ylabel="FFN gradient / last layer's")
    right.set(xscale="log", yscale="log", xlabel="layers", ylabel="relative change of the output")
    right.set_xticks(depths, [str(depth) for depth in depths])
    right.minorticks_off()
    left.set_title("Gradient at the start, one seed", fontsize=10)
    right.set_title("After one Adam step of 1e-4, five seeds", fontsize=10)
    left.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def table(rows: list[dict[str, Any]]) -> str:
    """One row per recipe: the range of the gradient ratio over five seeds, and the mean update."""
    depths = sorted({row["layers"] for row in rows if row["layers"] in (12, 64, 256, 1000)})
    updated = sorted({row["layers"] for row in rows if "updates" in row})
    cells = {(row["recipe"], row["layers"]): row for row in rows}
    lines = [
        "| recipe | "
        + " | ".join(f"gradient, {depth}L" for depth in depths)
        + " | "
        + " | ".join(f"update, {depth}L" for depth in updated)
        + " |",
        "|---" * (1 + len(depths) + len(updated)) + "|",
    ]
    for recipe in sorted({row["recipe"] for row in rows}):
        ratios = [span(cells.get((recipe, depth), {}).get("gradient_ratios")) for depth in depths]
        updates = [mean(cells.get((recipe, depth), {}).get("updates")) for depth in updated]
        lines.append(f"| {recipe} | {' | '.join(ratios + updates)} |")
    return "\n".join(lines) + "\n"


def span(values: list[float | None] | None) -> str:
    if values is None:
        return "-"
    found = [value for value in values if value is not None]
    return f"{min(found):.2g} to {max(found):.2g}" if found else "none yet"


def mean(values: list[float] | None) -> str:
    return "-" if values is None else f"{sum(values) / len(values):.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Figure and table of the propagation benchmark.")
    parser.add_argument("results", type=Path)
    options = parser.parse_args()
    rows = json.loads(options.results.read_text())["rows"]
    draw(rows, ROOT / "docs/images/propagation.svg")
    (options.results.parent / "table.md").write_text(table(rows))


if __name__ == "__main__":
    main()
