"""Weights with a row for each token, and a model without the rows of its first tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from kilolayer.convert.fold import AnyModel
from kilolayer.models.build import build_model

TABLES = ("embedding.weight", "source_embedding.weight", "vocabulary.weight", "output_bias.weight")
"""The names of such weights."""


@torch.no_grad()
def without_first(model: AnyModel, count: int, pad_id: int | None) -> AnyModel:
    """A new model whose ids are lower by `count`, for tokens from `count` on; all of them are predicted.

    pad_id: the new id of padding. Weights without a row for each token are the given model's own.
    """
    config, sizes = model.config, ("vocab_size", "source_vocab_size")
    fewer = {name: getattr(config, name) - count for name in sizes if getattr(config, name) is not None}
    first = max(config.first_predicted - count, 0)
    found = build_model(replace(config, **fewer, first_predicted=first, pad_id=pad_id), device="meta", seed=model.seed)
    weights = {name: weight[count:] if name in TABLES else weight for name, weight in model.state_dict().items()}
    found.load_state_dict(weights, assign=True)
    return found.train(model.training)
