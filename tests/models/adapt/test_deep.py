"""Depth: a BERT of 100 layers that learns nothing as its class starts it, and does under DeepNorm."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")


@pytest.mark.slow
def test_a_deep_model_lives_under_a_recipe_where_it_dies_without(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks/adapt/deep.py"))
    texts, lr = deep["read_texts"](), deep["LEARNING_RATES"]["bert"]
    settings = [deep["Setting"]("bert", adapted, lr, seed=1, layers=100, steps=60) for adapted in (False, True)]
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    plain, adapted = (deep["train"](setting, texts) for setting in settings)
    assert adapted["alive"]
    assert not plain["alive"]
    assert adapted["margin"] > (plain["margin"] or 0) + 0.2
