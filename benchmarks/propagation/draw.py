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
LOOKS = {
    "deepnorm": ("#0072B2", "o", "-"),
    "sub_ln": ("#D55E00", "s", "--"),
    "pre_ln": ("#E69F00", "^", "-."),
    "post_ln": ("#444444", "D", ":"),
}
"""Colour, marker and dash, so that the lines differ without colours too."""


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot the gradient by layer at 1,000 layers, and the relative update by depth."""
    mpl.rcParams.update({"svg.hashsalt": "kilolayer", "font.size": 16})  # reproducible ids; legible on a narrow screen
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.8, 4.6), layout="constrained")
    depths = sorted({row["layers"] for row in rows if "updates" in row})
    for recipe, label in SHOWN.items():
        gradients = next(row["gradients_of_seed_0"] for row in rows if row["recipe"] == recipe and row["layers"] == 1000)
        colour, marker, dash = LOOKS[recipe]
        look = {"color": colour, "marker": marker, "linestyle": dash, "label": label, "linewidth": 2, "markersize": 8}
        left.plot(range(1, 1001), [norm / gradients[-1] for norm in gradients], markevery=(60, 125), **look)
        by_depth = {row["layers"]: row["updates"] for row in rows if row["recipe"] == recipe and "updates" in row}
        updates = [by_depth[depth] for depth in depths]
        right.plot(depths, [sum(runs) / len(runs) for runs in updates], **look)
        right.fill_between(depths, [min(runs) for runs in updates], [max(runs) for runs in updates], color=colour, alpha=0.2)
    left.set(yscale="log", ylim=(1e-8, 1e2), xlabel="layer, from the input", ylabel="FFN gradient / last layer's")
    right.set(xscale="log", yscale="log", xlabel="layers", ylabel="relative change of the output")
    right.set_xticks(depths, [str(depth) for depth in depths])
    right.minorticks_off()
    left.set_title("Gradient at the start\n(one seed)", fontsize=16)
    right.set_title("After one Adam step of 1e-4\n(five seeds)", fontsize=16)
    left.legend(frameon=False, handlelength=2.6, fontsize=15, labelspacing=0.25, loc="lower right")
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
