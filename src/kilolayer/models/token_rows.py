"""Remove the first tokens of a model from all weights that have one row per token."""

from __future__ import annotations

from dataclasses import replace

import torch

from kilolayer.models.build import build_model
from kilolayer.models.fold import AnyModel

TABLES = ("embedding.weight", "source_embedding.weight", "vocabulary.weight", "output_bias.weight")
"""The names of weights with one row per token."""


@torch.no_grad()
def without_first(model: AnyModel, count: int, pad_id: int | None) -> AnyModel:
    """A new model without the first `count` ids; the other ids are reduced by `count`, and all are predicted.

    pad_id: the new id of padding. All other weights are shared with the given model.
    """
    config, sizes = model.config, ("vocab_size", "source_vocab_size")
    fewer = {name: getattr(config, name) - count for name in sizes if getattr(config, name) is not None}
    first = max(config.first_predicted - count, 0)
    found = build_model(replace(config, **fewer, first_predicted=first, pad_id=pad_id), device="meta", seed=model.seed)
    weights = {name: weight[count:] if name in TABLES else weight for name, weight in model.state_dict().items()}
    found.load_state_dict(weights, assign=True)
    return found.train(model.training)
