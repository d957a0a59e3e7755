"""How gradients and updates change with depth, for every recipe, at the start of training. CPU, fp32, about ten minutes.

    python benchmarks/propagation/measure.py benchmarks/propagation/results.json
    python benchmarks/propagation/draw.py benchmarks/propagation/results.json

The model is an encoder (dim 32, 4 heads, FFN 64) on random tokens. Gradient: the norm of the FFN weights' gradient, its mean
over the first tenth of the layers divided by that over the last tenth. Update: the relative change of the output after one Adam
step of 1e-4 without warm-up.
"""

from __future__ import annotations

import argparse
import json
import platform
from functools import partial
from math import isnan
from pathlib import Path

import torch
import torch.nn.functional as F

import kilolayer as kl
from kilolayer.probe.propagation import first_over_last, gradient_profile, relative_update

VOCABULARY, SEEDS = 64, range(5)
GRADIENT_DEPTHS, UPDATE_DEPTHS = (12, 64, 256, 1000), (6, 24, 100, 200)
QUADRATIC = {"dlcl"}  # its cost is quadratic in depth: not run at 1,000 layers


def measure(recipe: str, layers: int, seed: int, update: bool) -> tuple[tuple[float, ...], float | None]:
    """The gradient norm of each layer and, if requested, the relative update."""
    torch.manual_seed(seed)
    start = {"init": "xavier"} if recipe in ("post_ln", "pre_ln") else {}  # as in the theory of these two
    model = kl.Encoder(VOCABULARY, 32, 4, 64, layers, kl.recipes.get(recipe, **start))
    tokens, labels = torch.randint(1, VOCABULARY, (2, 4, 16))
    if model.config.recipe.calibration():
        kl.calibrate(model, tokens)

    def loss(model: torch.nn.Module) -> torch.Tensor:
        return F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())

    gradients = gradient_profile(model, loss).encoder
    if not update:
        return gradients, None
    return gradients, relative_update(model, loss, lambda m: m(tokens).states, partial(torch.optim.Adam, lr=1e-4))


def main() -> None:
    parser = argparse.ArgumentParser(description="Gradients and updates over depth.")
    parser.add_argument("results", type=Path)
    parser.add_argument("--depths", type=int, nargs="*", help="only these depths")
    parser.add_argument("--recipes", nargs="+", choices=kl.recipes.names(), help="only these; rows of other recipes are kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = json.loads(options.results.read_text()) if options.recipes and options.results.exists() else {}
    rows = [row for row in before.get("rows", []) if row["recipe"] not in options.recipes]
    hardware = f"CPU, {platform.machine()}, one thread"
    for recipe in options.recipes or kl.recipes.names():
        for layers in sorted({*GRADIENT_DEPTHS, *UPDATE_DEPTHS} & set(options.depths or [*GRADIENT_DEPTHS, *UPDATE_DEPTHS])):
            if recipe in QUADRATIC and layers > 256:
                continue
            runs = [measure(recipe, layers, seed, layers in UPDATE_DEPTHS) for seed in SEEDS]
            ratios = [first_over_last(run[0]) for run in runs]
            row = {"recipe": recipe, "layers": layers, "gradient_ratios": [None if isnan(each) else each for each in ratios]}
            if layers in UPDATE_DEPTHS:
                row["updates"] = [run[1] for run in runs]
            if layers == max(GRADIENT_DEPTHS):
                row["gradients_of_seed_0"] = [float(f"{norm:.4g}") for norm in runs[0][0]]
            if before:
                row["hardware"] = hardware
            rows.append(row)
            print(recipe, layers, [f"{ratio:.3g}" for ratio in ratios], row.get("updates", ""), flush=True)
    document = {
        "command": "python benchmarks/propagation/measure.py benchmarks/propagation/results.json",
        "hardware": before.get("hardware", hardware),
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "kilolayer": kl.__version__},
        "seeds": list(SEEDS),
        "rows": sorted(rows, key=lambda row: row["recipe"]),
    }
    options.results.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
