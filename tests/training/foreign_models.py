"""Small models of Transformers with weights in which nothing is 0 or 1, and the folders that they save."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    BertConfig,
    GPT2Config,
    MarianConfig,
    OPTConfig,
    PreTrainedModel,
)

DIM, HEADS, FFN_DIM, LAYERS, LENGTH = 16, 2, 24, 2, 48


def bert_config(vocabulary: int, **options: Any) -> BertConfig:
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=FFN_DIM,
        max_position_embeddings=LENGTH,
        **options,
    )


def gpt2_config(vocabulary: int, **options: Any) -> GPT2Config:
    sizes: dict[str, Any] = {"n_embd": DIM, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH}
    ends: dict[str, Any] = {"bos_token_id": vocabulary - 1, "eos_token_id": vocabulary - 1}
    return GPT2Config(vocab_size=vocabulary, **{**sizes, **ends, **options})


def opt_config(vocabulary: int, **options: Any) -> OPTConfig:
    return OPTConfig(
        vocab_size=vocabulary,
        hidden_size=DIM,
        word_embed_proj_dim=DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        ffn_dim=FFN_DIM,
        max_position_embeddings=LENGTH,
        **options,
    )


def marian_config(vocabulary: int, **options: Any) -> MarianConfig:
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in _OF_SIDES.items()}
    usual = {"pad_token_id": vocabulary - 1, "decoder_start_token_id": vocabulary - 1, "eos_token_id": 0}
    return MarianConfig(
        vocab_size=vocabulary,
        d_model=DIM,
        max_position_embeddings=128,
        **{**sizes, **usual, "forced_eos_token_id": None, "scale_embedding": True, **options},
    )


_OF_SIDES = {"layers": LAYERS, "attention_heads": HEADS, "ffn_dim": FFN_DIM}


@torch.no_grad()
def spread(model: PreTrainedModel) -> PreTrainedModel:
    """In fp64 and for evaluation: a weight that goes astray shows."""
    generator = torch.Generator().manual_seed(0)
    model.double().eval()
    for name, parameter in model.named_parameters():
        if "embed_positions" not in name or "Sinusoidal" not in type(model.get_submodule(name.rpartition(".")[0])).__name__:
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.2)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.copy_(torch.randn(model.final_logits_bias.shape, generator=generator, dtype=torch.float64))
    return model
