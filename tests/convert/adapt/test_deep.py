"""Depth: a BERT that does not learn from context as its class starts it, and does under DeepNorm."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")


@pytest.mark.slow
def test_a_deep_model_lives_under_a_recipe_where_it_dies_without() -> None:
    deep: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks/adapt/deep.py"))
    texts = deep["read_texts"]()
    plain, adapted = (
        deep["train"]("bert", recipe, texts, layers=48, lr=3e-3, steps=120, seed=1, batch=32) for recipe in (False, True)
    )
    assert adapted["alive"]
    assert not plain["alive"]
    assert adapted["margin"] > (plain["margin"] or 0) + 0.1
