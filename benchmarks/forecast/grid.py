"""The runs on which the forecast is calibrated and tested: recipes, depths, learning rates and warm-ups on two texts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

Part = Literal["calibration", "held-out"]
RECIPES = ("post_ln", "pre_ln", "deepnorm", "sub_ln", "admin", "rezero")
RATES = (2.5e-4, 1e-3, 4e-3, 1.6e-2, 6.4e-2)
SHALLOW = (6, 12, 18)
WARMUP = 0.1  # of the steps
OTHER_WARMUPS = (0.01, 0.4)


@dataclass(frozen=True)
class Row:
    """One model on one text; for a translation model, layers per side."""

    text: str
    recipe: str
    layers: int

    @property
    def part(self) -> Part:
        return "calibration" if self.layers <= max(SHALLOW) else "held-out"

    @property
    def name(self) -> str:
        return f"{self.text} {self.recipe} {self.layers}"


@dataclass(frozen=True)
class Job:
    """One run of a row. warmup: as a fraction of its steps."""

    row: Row
    lr: float
    warmup: float = WARMUP

    @property
    def name(self) -> str:
        return f"{self.row.name} lr{self.lr:g} warmup{self.warmup:g}"


def rows() -> Iterator[Row]:
    """The most important rows first, so that a session that ends early has complete rows."""
    yield from (Row(*each) for each in product(("shakespeare", "multi30k"), RECIPES, (6, 18)))
    yield from (Row(*each) for each in product(("shakespeare", "multi30k"), RECIPES, (36,)))
    first, second = RECIPES[:3], RECIPES[3:]
    yield from (Row("shakespeare", recipe, 100) for recipe in first)
    yield from (Row("multi30k", recipe, 50) for recipe in second)
    yield from (Row("shakespeare", recipe, 200) for recipe in ("deepnorm", "pre_ln"))
    yield from (Row("multi30k", recipe, 100) for recipe in ("deepnorm", "sub_ln"))
    yield from (Row(*each) for each in product(("shakespeare", "multi30k"), RECIPES, (12,)))


def jobs_of(row: Row, rates: Sequence[float] = RATES) -> list[Job]:
    """Every learning rate at the usual warm-up; at two depths of three recipes, the middle rates also with other warm-ups."""
    found = [Job(row, lr) for lr in rates]
    if row.text == "shakespeare" and row.layers in (18, 36) and row.recipe in ("post_ln", "pre_ln", "deepnorm"):
        found += [Job(row, lr, warmup) for lr in rates[1:3] for warmup in OTHER_WARMUPS]
    return found


def table_of(row: Row, size: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a row's runs. size: dim, vocabulary, tokens per batch, steps, device."""
    data = Path(os.environ["KILOLAYER_DATA"])
    dim = size["dim"]
    shared = {
        "model": {"layers": row.layers, "recipe": row.recipe, "dim": dim, "heads": dim // 16, "ffn_dim": 4 * dim},
        "train": {
            "steps": size["steps"],
            "schedule": "linear",
            "label_smoothing": 0.0,
            "device": size["device"],
            "threads": 1,
        },
    }
    if row.text == "multi30k":
        parallel = {"folder": str(data / "multi30k"), "directions": ["en-de"]}
        pieces = {"kind": "bpe", "vocab_size": size["vocabulary"]}
        return {**shared, "data": parallel, "tokenizer": pieces, "batches": {"tokens": size["tokens"], "shapes": 3}}
    text = {"train": str(data / "lm_small" / "tinyshakespeare.txt.xz"), "length": 64}
    return {**shared, "task": "causal_lm", "text": text, "tokenizer": {"kind": "bytes"}, "batches": {"tokens": size["tokens"]}}
