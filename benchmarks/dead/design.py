"""The runs on which the rule about dead stacks is fitted and tested: series of learning rates, drawn once from a fixed seed.

A series is a model, a task, a warm-up and an eps; its learning rates differ by factors of 2 and are meant to lie on both sides
of the largest one that the model survives. Series, not runs, are assigned to one of the two sets, so that no run of a series
that the rule was fitted on is among those that test it. Series of image classifiers, drawn later, are a test of their own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

Set = Literal["fit", "test"]
TASKS = ("translation", "causal_lm", "masked_lm")
DEPTHS = {6: 25, 12: 20, 24: 20, 50: 17, 100: 12, 200: 6}
"""Layers, per side in a translator, and how often they are drawn."""
WARMUPS = (0.01, 0.05, 0.1, 0.2, 0.4, 0.6)
POST = ("post_ln", "deepnorm", "admin", "ds_init", "post_ln_init", "b2t", "mix_ln")
PRE = ("pre_ln", "sub_ln", "normformer", "rezero", "r_fixup", "t_fixup", "layer_scale", "peri_ln", "complete_p")
OFTEN = ("deepnorm", "deepnorm", "deepnorm", "post_ln", "admin", "pre_ln", "sub_ln")
"""Drawn as often as all others together."""
STEPS = {6: 400, 12: 400, 24: 300, 50: 300, 100: 200, 200: 200}
SERIES, OF_IMAGES = 110, 30


@dataclass(frozen=True)
class Run:
    """One run; warmup: as a fraction of its steps."""

    series: int
    set: Set
    task: str
    recipe: str
    layers: int
    dim: int
    lr: float
    warmup: float
    eps: float
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.series:03d} {self.task} {self.recipe} {self.layers}L d{self.dim} lr{self.lr:g} w{self.warmup:g}"


def runs() -> Iterator[Run]:
    """All runs, series by series."""
    dice = random.Random(30)
    for series in range(SERIES):
        yield from _series(series, TASKS[series % 3], dice)


def image_runs() -> Iterator[Run]:
    """Those of image classifiers, series by series."""
    dice = random.Random(33)
    for series in range(SERIES, SERIES + OF_IMAGES):
        yield from (replace(run, set="test") for run in _series(series, "classify_image", dice))


def _series(series: int, task: str, dice: random.Random) -> Iterator[Run]:
    recipe = dice.choice(OFTEN) if dice.random() < 0.5 else dice.choice(POST + PRE)
    layers = dice.choices(list(DEPTHS), list(DEPTHS.values()))[0]
    if task == "translation" and layers > 50:  # the runs of benchmarks/reproduce have the deeper ones
        layers = 50
    dim = dice.choice((32, 32, 64)) if layers <= 24 else 32
    lowest = {True: 5e-4 if layers >= 24 else 1e-3, False: 4e-3}[recipe in POST] * dice.choice((0.5, 1, 1, 2))
    warmup, eps, seed = dice.choice(WARMUPS), dice.choice((1e-8, 1e-8, 1e-4)), dice.randrange(1000)
    which: Set = "fit" if dice.random() < 0.35 else "test"
    for power in range(4):
        yield Run(series, which, task, recipe, layers, dim, lowest * 2**power, warmup, eps, seed, STEPS[layers])


def table_of(run: Run, data: Path, corpus: Path) -> dict[str, Any]:
    """The configuration of a run. data: the folder of real corpora; corpus: that of the embedded one."""
    dim = run.dim
    shared: dict[str, Any] = {
        "model": {
            "recipe": run.recipe,
            "layers": run.layers,
            "dim": dim,
            "heads": dim // 16,
            "ffn_dim": 4 * dim,
            "dropout": 0.1,
        },
        "train": {
            "steps": run.steps,
            "lr": run.lr,
            "eps": run.eps,
            "seed": run.seed,
            "warmup_steps": max(1, round(run.warmup * run.steps)),
            "schedule": "linear",
            "device": "cpu",
            "threads": 1,
            "layers_every": 0,
        },
    }
    if run.task == "translation":
        text = {"folder": str(corpus), "directions": ["en-de"], "train": ["train"], "valid": "valid"}
        pieces = {"vocab_size": 300, "byte_fallback": False, "character_coverage": 1.0}
        return shared | {"data": text, "tokenizer": pieces, "batches": {"tokens": 400, "shapes": 3}}
    if run.task == "classify_image":
        shared["model"]["image"] = {"patch": 8}
        source = f"{data / 'cifar10' / 'cifar10_jpeg.tar.xz'}:train"
        images = {"train": source, "size": 32, "rows": 16, "valid_share": 0.02}
        return shared | {"task": run.task, "images": images, "augment": {"crop": "pad"}}
    text = {"train": str(data / "lm_small" / "tinyshakespeare.txt.xz"), "length": 64}
    return shared | {"task": run.task, "text": text, "tokenizer": {"kind": "bytes"}, "batches": {"tokens": 256}}
