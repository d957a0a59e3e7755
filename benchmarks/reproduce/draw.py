"""Draw docs/images/recipes-by-depth.svg from deepnet-table1.json: BLEU by depth, and the trough that living encoders pass.

python benchmarks/reproduce/draw.py
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
PICTURE = HERE.parents[1] / "docs/images/recipes-by-depth.svg"
SHOWN = {
    "deepnorm": "DeepNorm",
    "post_ln": "Post-LN",
    "pre_ln": "Pre-LN",
    "rezero": "ReZero",
    "r_fixup": "R-Fixup",
    "t_fixup": "T-Fixup",
    "dlcl": "DLCL",
    "normformer": "NormFormer",
    "admin": "Admin",
    "ds_init": "DS-Init",
}
ENCODERS = {(50, 1e-3): "50L-50L, 1e-3, lives", (50, 2e-3): "50L-50L, 2e-3, dies", (18, 2e-3): "18L-18L, 2e-3, lives"}


def complete_cells(found: dict[str, Any]) -> dict[str, dict[int, float]]:
    """The mean BLEU of each method and depth whose best rate has three seeds, all of them alive."""
    cells: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for run in found["runs"]:
        recipe = run["options"]["model.recipe"]
        name = recipe if isinstance(recipe, str) else recipe["name"]
        cells.setdefault(name, {}).setdefault(run["options"]["layers"], []).append(run)
    return {
        name: {
            depth: fmean(run["bleu"] for run in runs)
            for depth, runs in depths.items()
            if len(runs) == 3 and len({run["options"]["train.lr"] for run in runs}) == 1 and _all_finished(runs)
        }
        for name, depths in cells.items()
    }


def _all_finished(runs: list[dict[str, Any]]) -> bool:
    return all(run["outcome"] == "finished" for run in runs)


def main() -> None:
    found = json.loads((HERE / "deepnet-table1.json").read_text())["found"]
    mpl.rcParams["svg.hashsalt"] = "kilolayer"  # for reproducible SVG ids
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained")
    cells = complete_cells(found)
    for name, label in SHOWN.items():
        if points := cells.get(name, {}):
            left.plot(list(points), list(points.values()), marker="o", label=label)
    left.set(xscale="log", xlabel="layers per side", ylabel="BLEU", ylim=(0, None))
    left.set_xticks([6, 18, 50, 100], ["6", "18", "50", "100"])
    left.minorticks_off()
    left.legend(frameon=False, fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.17), columnspacing=1.0)
    left.set_title("BLEU at the best learning rate, three seeds", fontsize=10)
    for (layers, lr), label in ENCODERS.items():
        run = next(
            run
            for run in found["runs"] + found["not_chosen"]
            if run["options"] == {"model.recipe": "deepnorm", "layers": layers, "train.lr": lr, "train.seed": 1}
        )
        steps, shares = zip(*run["stacks"]["encoder"], strict=True)
        right.plot(steps, shares, label=label, linewidth=1)
    right.axhline(1e-4, color="grey", linewidth=0.8, linestyle=":")
    right.set(yscale="log", xlabel="step", ylabel="share of the largest layer's gradient")
    right.legend(frameon=False)
    right.set_title("Gradient of the first layers of DeepNorm's encoder", fontsize=10)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
