"""Runs as a comparison tells them, without training, for the tests of rules."""

from __future__ import annotations

from typing import Any

import pytest

from kilolayer.reproduce.stored_run import Run


def run_of(loss: float | None, seed: int = 1, outcome: str = "finished", **options: Any) -> Run:
    """A run as a comparison tells it; options with "_" for "."."""
    named = {name.replace("__", "."): value for name, value in options.items()} | {"train.seed": seed}
    text = "finished" if outcome == "finished" else f"{outcome} at step 7"
    known = {"outcome": outcome, "text": text, "loss": loss, "cost": loss, "bleu": None, "folder": "", "name": ""}
    return {"options": named, **known}


NO_RESULT = pytest.mark.parametrize("open_", ["waiting", "unfinished", "failed"])
"""What may be of a run that says nothing yet."""


def two_seeds(loss: float | str, **options: Any) -> list[Run]:
    """Runs of two seeds 0.001 apart, or of an outcome without a loss."""
    if isinstance(loss, str):
        return [run_of(None, seed, loss, **options) for seed in (1, 2)]
    return [run_of(loss + 0.001 * seed, seed, **options) for seed in (1, 2)]


def translated(loss: float | str, bleu: float | None = 20.0, **options: Any) -> list[Run]:
    """As `two_seeds`, with a BLEU."""
    return [run | {"bleu": bleu} for run in two_seeds(loss, **options)]
