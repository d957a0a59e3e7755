"""Measurements behind the limits of `kilolayer diagnose`: untrained models of several recipes and depths, Multi30k, CPU.

    python benchmarks/diagnose/calibrate.py OUT [--depths 6 18 50 --recipes post_ln deepnorm]    # KILOLAYER_DATA names the data

Writes OUT/results.json: for each recipe and depth, the fraction of the gradient in a stack's first layers, and the cosine,
rank, growth and dead ReLUs of its states; and for models of runs with known outcome, how far Adam's first step of 1e-5 moves
the output.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from pathlib import Path
from typing import Any

import kilolayer as kl
from kilolayer.config import build, merge
from kilolayer.probe.diagnosis import Measurements, first_share
from kilolayer.tasks.config import RunConfig

SMALL = {"dim": 64, "heads": 4, "ffn_dim": 256}
WIDE = {"dim": 256, "heads": 4, "ffn_dim": 1024}
KNOWN: dict[str, dict[str, Any]] = (
    {  # the models of benchmarks/translation/warmup.json, thousand-*.json, understanding/masked-sweep.json
        "translation deepnorm 48L-48L": {"model": {**SMALL, "layers": 48}},
        "translation deepnorm 48L-48L, eps 1e-4": {"model": {**SMALL, "layers": 48}, "train": {"eps": 1e-4}},
        "translation deepnorm 48L-48L, eps 4e-4": {"model": {**SMALL, "layers": 48}, "train": {"eps": 4e-4}},
        "translation post_ln 6L-6L": {"model": {**WIDE, "layers": 6, "recipe": "post_ln"}},
        "translation deepnorm 6L-6L": {"model": {**WIDE, "layers": 6}},
        "translation deepnorm 18L-18L": {"model": {**WIDE, "layers": 18}},
    }
    | {
        f"masked_lm {recipe} 12L": {"task": "masked_lm", "model": {**WIDE, "layers": 12, "recipe": recipe}}
        for recipe in ("deepnorm", "post_ln", "pre_ln", "sub_ln", "normformer")
    }
)


def configuration(table: dict[str, Any], data: Path, scratch: Path) -> RunConfig:
    """A run on Multi30k; a masked language model reads its English side."""
    own: dict[str, Any] = {"batches": {"tokens": 1024}, "train": {"device": "cpu"}}
    if table.get("task") == "masked_lm":
        text = scratch / "train.en"
        with gzip.open(data / "train.en.gz") as lines:
            text.write_bytes(b"".join(lines.readlines()[:3000]))
        own |= {"text": {"train": str(text), "length": 128}, "tokenizer": {"kind": "bytes"}}
    else:
        own |= {"data": {"folder": str(data), "directions": ["en-de"], "valid": "val"}}
        own |= {"tokenizer": {"kind": "bpe", "vocab_size": 4000}}
    return build(RunConfig, merge(own, table))


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
    parser.add_argument("--known", nargs="*", default=list(KNOWN), choices=list(KNOWN))
    chosen = parser.parse_args()
    data = Path(os.environ["KILOLAYER_DATA"]) / "multi30k"
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / "results.json"
    made = json.loads(path.read_text()) if path.exists() else {"starts": {}, "first_step": {}}
    for depth in chosen.depths:
        for recipe in chosen.recipes:
            config = configuration({"model": {**SMALL, "layers": depth, "recipe": recipe}}, data, chosen.out)
            made["starts"][f"{recipe} {depth}L-{depth}L"] = describe(kl.diagnose(config, device="cpu").measured)
    for name in chosen.known:
        found = kl.diagnose(configuration(KNOWN[name], data, chosen.out), device="cpu").measured
        made["first_step"][name] = found.updates.adam_start
    document = {**made, "command": "python benchmarks/diagnose/calibrate.py OUT", "hardware": "CPU"}
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
