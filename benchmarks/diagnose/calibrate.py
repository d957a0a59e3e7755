"""Measurements behind the limits of `kilolayer diagnose`: untrained models of several recipes and depths, Multi30k, CPU.

    python benchmarks/diagnose/calibrate.py OUT [--depths 6 18 50 --recipes post_ln deepnorm]    # KILOLAYER_DATA names the data

Writes OUT/results.json: for each recipe and depth, the fraction of the gradient in a stack's first layers, and the cosine,
rank, growth and dead ReLUs of its states.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import kilolayer as kl
from kilolayer.config import build
from kilolayer.probe.diagnosis import Measurements, first_share
from kilolayer.tasks.config import RunConfig

SMALL = {"dim": 64, "heads": 4, "ffn_dim": 256}


def configuration(model: dict[str, Any], data: Path) -> RunConfig:
    """A run on Multi30k."""
    text = {"folder": str(data), "directions": ["en-de"], "valid": "val"}
    own = {"data": text, "tokenizer": {"kind": "bpe", "vocab_size": 4000}, "batches": {"tokens": 1024}}
    return build(RunConfig, {**own, "train": {"device": "cpu"}, "model": model})


def describe(found: Measurements) -> dict[str, dict[str, float | None]]:
    """Summary numbers of each stack."""
    return {
        side: {
            "gradient_of_first_layers": first_share(norms) if max(norms) else None,
            "cosine": found.rank.cosine[side][-1],
            "effective_rank": found.rank.effective[side][-1],
            "growth": found.residual[side][-1] / found.residual[side][0],
            "dead_units": max(found.dead_units[side]),
        }
        for side, norms in found.gradients.layers.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Numbers behind the limits of a diagnosis.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--depths", type=int, nargs="*", default=[6, 18, 50])
    parser.add_argument("--recipes", nargs="*", default=kl.recipes.names())
    chosen = parser.parse_args()
    data = Path(os.environ["KILOLAYER_DATA"]) / "multi30k"
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / "results.json"
    made = json.loads(path.read_text()) if path.exists() else {"starts": {}}
    for depth in chosen.depths:
        for recipe in chosen.recipes:
            config = configuration({**SMALL, "layers": depth, "recipe": recipe}, data)
            made["starts"][f"{recipe} {depth}L-{depth}L"] = describe(kl.diagnose(config, device="cpu").measured)
    document = {**made, "command": "python benchmarks/diagnose/calibrate.py OUT", "hardware": "CPU"}
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
