"""Post-LN translation models as `MarianMTModel`: sinusoidal positions; source, target and output share an embedding table or
not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor

from kilolayer import recipes
from kilolayer.errors import InputError
from kilolayer.huggingface.foreign_class import ForeignClass, is_plain, shared_misfits
from kilolayer.huggingface.weights import Entry, linear, norm
from kilolayer.models.config import ModelConfig
from kilolayer.recipes.base import NORM, Plan, Side

POSITIONS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")
"""Sinusoidal tables, which the class can compute, so a file need not contain them."""
LOGITS_BIAS = "final_logits_bias"
"""A bias on the logits, [1, vocabulary]; all 0 if the Kilolayer model has none."""
SEQ2SEQ_OPTIONS = {
    "dim": ("d_model",),
    "heads": ("encoder_attention_heads", "decoder_attention_heads"),
    "ffn_dim": ("encoder_ffn_dim", "decoder_ffn_dim"),
    "activation": ("activation_function",),
    "dropout": ("dropout",),
    "attention_dropout": ("attention_dropout",),
    "activation_dropout": ("activation_dropout",),
    "pad_id": ("pad_token_id",),
    "scale_embeddings": ("scale_embedding",),
}


class Marian(ForeignClass):
    """LN(x + f(x)) in every sublayer, without a final norm."""

    model_type: ClassVar[str] = "marian"
    architecture: ClassVar[str] = "MarianMTModel"
    options: ClassVar[Mapping[str, tuple[str, ...]]] = SEQ2SEQ_OPTIONS
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 58101,
        "d_model": 1024,
        "encoder_layers": 12,
        "decoder_layers": 12,
        "encoder_attention_heads": 16,
        "decoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096,
        "activation_function": "gelu",
        "dropout": 0.1,
        "pad_token_id": 58100,
        "eos_token_id": 0,
    }
    required: ClassVar[Mapping[str, Any]] = {
        "normalize_embedding": False,
        "normalize_before": False,
        "add_final_layer_norm": False,
        "static_position_embeddings": True,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
    }
    readable: ClassVar[tuple[str, ...]] = ("MarianMTModel", "MarianModel")
    outputs: ClassVar[tuple[str, ...]] = ("lm_head.", LOGITS_BIAS)
    unread: ClassVar[str] = "|".join(map(re.escape, (*POSITIONS, LOGITS_BIAS)))  # the bias, if it is 0

    def misfits(self, config: ModelConfig) -> Iterator[str]:
        if config.shape != "encoder_decoder":
            yield "it is no encoder-decoder"
        if not is_plain(config, Plan(out_norm=NORM)):
            yield f"its layers are not plain Post-LN: {config.recipe.equation}"
        if config.positions != "sinusoidal":
            yield f"its positions are {config.positions}, and Marian's are sinusoidal"
        if config.pad_id is None:
            yield "it has no padding token"
        yield from shared_misfits(config)

    def foreign_config(self, config: ModelConfig) -> dict[str, Any]:
        tied = config.tie_embeddings
        return {
            **super().foreign_config(config),
            "encoder_layers": config.depths.encoder,
            "decoder_layers": config.depths.decoder,
            "vocab_size": config.source_vocab_size or config.vocab_size,
            "decoder_vocab_size": config.vocab_size,
            "share_encoder_decoder_embeddings": tied is True,
            "tie_word_embeddings": bool(tied),
            "is_encoder_decoder": True,
        }

    def own_options(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        source, target = theirs["vocab_size"], theirs.get("decoder_vocab_size") or theirs["vocab_size"]
        shared = theirs.get("share_encoder_decoder_embeddings", True)
        tied = theirs.get("tie_word_embeddings", True)
        if shared and not tied:
            raise InputError(
                "source and target share a table that the output does not",
                where="config.json",
                fix="supported: one table for all three, one for target and output, or none",
            )
        return {
            "scale_embeddings": False,  # Transformers' default
            **super().own_options(theirs),
            "shape": "encoder_decoder",
            "recipe": recipes.PLAIN,
            "encoder_layers": theirs["encoder_layers"],
            "decoder_layers": theirs["decoder_layers"],
            "vocab_size": target,
            "source_vocab_size": None if shared or source == target else source,
            "tie_embeddings": True if shared else "output" if tied else False,
        }

    def entries(self, config: ModelConfig) -> list[Entry]:
        if config.tie_embeddings is True:
            tables = [Entry("embedding.weight", ("model.shared.weight",))]
        else:
            tables = [
                Entry("source_embedding.weight", ("model.encoder.embed_tokens.weight",)),
                Entry("embedding.weight", ("model.decoder.embed_tokens.weight",)),
            ]
        if not config.tie_embeddings:
            tables.append(Entry("vocabulary.weight", ("lm_head.weight",)))
        if config.output_bias:
            tables.append(Entry("output_bias.weight", (LOGITS_BIAS,), as_row=True))
        return tables + seq2seq_entries(config, "out_norm")

    def options_of_weights(self, tensors: Mapping[str, Tensor], theirs: Mapping[str, Any]) -> dict[str, Any]:
        return {"output_bias": LOGITS_BIAS in tensors and bool(tensors[LOGITS_BIAS].any())}

    def copies(self, config: ModelConfig) -> dict[str, str]:
        target = "model.decoder.embed_tokens.weight"
        if config.tie_embeddings is True:
            names = ("lm_head.weight", "model.encoder.embed_tokens.weight", target)
            return dict.fromkeys(names, "model.shared.weight")
        return {"lm_head.weight": target} if config.tie_embeddings else {}


def seq2seq_entries(config: ModelConfig, norm_name: str) -> list[Entry]:
    """The layers of both stacks, with the names of BART and related classes. norm_name: `pre_norm` or `out_norm`."""
    sides: tuple[Side, ...] = ("encoder", "decoder")
    return [
        entry
        for side in sides
        for index in range(config.depths.of(side))
        for entry in layer_entries(f"{side}.blocks.{index}", f"model.{side}.layers.{index}", norm_name, side == "decoder")
    ]


def layer_entries(ours: str, theirs: str, norm_name: str, reads_memory: bool) -> list[Entry]:
    """One layer, with the names of BART and related classes. reads_memory: whether it has cross-attention."""
    heads = [f"{theirs}.self_attn.{part}_proj" for part in ("q", "k", "v", "out")]
    found = [
        *linear(f"{ours}.self_attention.f.query_key_value", *heads[:3]),
        *linear(f"{ours}.self_attention.f.output", heads[3]),
        *norm(f"{ours}.self_attention.{norm_name}", f"{theirs}.self_attn_layer_norm"),
        *linear(f"{ours}.feedforward.f.input", f"{theirs}.fc1"),
        *linear(f"{ours}.feedforward.f.output", f"{theirs}.fc2"),
        *norm(f"{ours}.feedforward.{norm_name}", f"{theirs}.final_layer_norm"),
    ]
    if reads_memory:
        query, key, value, output = (f"{theirs}.encoder_attn.{part}_proj" for part in ("q", "k", "v", "out"))
        found += linear(f"{ours}.cross_attention.f.query", query)
        found += linear(f"{ours}.cross_attention.f.key_value", key, value)
        found += linear(f"{ours}.cross_attention.f.output", output)
        found += norm(f"{ours}.cross_attention.{norm_name}", f"{theirs}.encoder_attn_layer_norm")
    return found
