"""Small models in Kilolayer's classes for Transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kilolayer as kl
from kilolayer.huggingface.auto_classes import (
    KilolayerForCausalLM,
    KilolayerForMaskedLM,
    KilolayerForSeq2SeqLM,
    KilolayerForSequenceClassification,
)

SIZES: dict[str, Any] = {"vocab_size": 23, "dim": 16, "heads": 2, "ffn_dim": 24, "layers": 2}
IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2}
SOURCE = torch.tensor([[5, 6, 7, 8, 3], [9, 10, 3, 0, 0]])
TARGET = torch.tensor([[2, 11, 12, 13], [2, 14, 0, 0]])
WRAPPERS: dict[str, Any] = {
    "encoder_decoder": KilolayerForSeq2SeqLM,
    "decoder": KilolayerForCausalLM,
    "encoder": KilolayerForMaskedLM,
}


def bare_model(shape: str, recipe: str = "sub_ln", **options: Any) -> Any:
    """A model of Kilolayer whose every weight is away from its start, so that none could be filled anew unseen."""
    config = kl.ModelConfig(**{**SIZES, "shape": shape, "recipe": kl.recipes.get(recipe), **options})
    model = kl.build_model(config, seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(each for name, each in model.state_dict().items() if name.endswith("bias"))):
            tensor.add_(0.3 * torch.randn(tensor.shape, generator=generator))
    return model


def wrapped(model: Any, **options: Any) -> Any:
    """A model in the class of its shape."""
    kind = KilolayerForSequenceClassification if model.config.head is not None else WRAPPERS[model.config.shape]
    return kind.from_kilolayer(model, **IDS, **options)


def logits_of(model: Any) -> Tensor:
    """Kilolayer's own, of SOURCE and TARGET."""
    return (model(SOURCE, TARGET) if model.config.shape == "encoder_decoder" else model(SOURCE)).logits


def inputs_of(model: Any) -> dict[str, Any]:
    """The same as Transformers takes it; without a cache, whose layout in memory would change the last bit."""
    inputs: dict[str, Any] = {"input_ids": SOURCE, "attention_mask": (SOURCE != 0).long()}
    if model.config.model["shape"] != "encoder":
        inputs["use_cache"] = False
    return {**inputs, "decoder_input_ids": TARGET} if model.config.is_encoder_decoder else inputs
