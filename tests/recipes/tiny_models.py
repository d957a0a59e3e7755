"""The small models and batches that the tests of recipes share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import kilolayer as kl

PADDING = 0
# Padded on the right and on the left: behind a decoder's causal mask, padding on the right alone would never be seen.
SOURCE = torch.tensor([[3, 5, 2, 9, 4, 0], [0, 0, 7, 1, 8, 6]])
TARGET = torch.tensor([[1, 6, 0, 0, 0], [0, 4, 2, 7, 3]])
HEADS = 2
SHAPES = {
    "encoder": {"encoder": 3, "decoder": 0},
    "decoder": {"encoder": 0, "decoder": 2},
    "encoder_decoder": {"encoder": 3, "decoder": 2},
}


def build(shape: str, recipe: str, recipe_options: Mapping[str, Any] | None = None, **options: Any) -> nn.Module:
    """A model of one of SHAPES in fp64, as it starts."""
    depths = {f"{side}_layers": layers for side, layers in SHAPES[shape].items() if layers}
    settings = {"dim": 8, "heads": HEADS, "ffn_dim": 12, "vocab_size": 11, "positions": "none", "tie_embeddings": True}
    settings |= {**depths, **options}
    config = kl.ModelConfig(shape=shape, recipe=kl.recipes.get(recipe, **recipe_options or {}), **settings)
    return kl.build_model(config, dtype=torch.float64)


def randomise(weights: Mapping[str, Tensor], seed: int = 0) -> None:
    """Give each weight its own values, so that none is at a start (0, 1, an average) that would hide a mistake."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in weights.items():
        is_gain = name.endswith(".weight") and value.dim() != 2
        if is_gain:
            value.uniform_(0.5, 1.5, generator=generator)
        else:
            value.normal_(0, 0.4, generator=generator)
