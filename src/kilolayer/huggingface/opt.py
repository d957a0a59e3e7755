"""Decoders as `OPTForCausalLM`, which supports Pre-LN and Post-LN, with learned positions and unscaled embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from kilolayer import recipes
from kilolayer.huggingface.foreign_class import ForeignClass, is_plain, shared_misfits
from kilolayer.huggingface.marian import layer_entries
from kilolayer.huggingface.weights import Entry, norm
from kilolayer.models.config import ModelConfig
from kilolayer.recipes.base import NORM, Plan

ROWS_BEFORE = 2
"""OPT's position table begins with two rows that are not used."""
AFFINE = {"_remove_final_layer_norm": False, "enable_bias": True, "layer_norm_elementwise_affine": True}
"""Options that match every Kilolayer model."""


class OPT(ForeignClass):
    """LN(x + f(x)), or x + f(LN(x)) with a final LN."""

    model_type: ClassVar[str] = "opt"
    architecture: ClassVar[str] = "OPTForCausalLM"
    options: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "dim": ("hidden_size", "word_embed_proj_dim"),
        "heads": ("num_attention_heads",),
        "ffn_dim": ("ffn_dim",),
        "activation": ("activation_function",),
        "dropout": ("dropout",),
        "attention_dropout": ("attention_dropout",),
        "vocab_size": ("vocab_size",),
        "max_length": ("max_position_embeddings",),
        "tie_embeddings": ("tie_word_embeddings",),
    }

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 50272,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "ffn_dim": 3072,
        "max_position_embeddings": 2048,
        "activation_function": "relu",
        "dropout": 0.1,
        "tie_word_embeddings": True,
        "pad_token_id": 1,
        "eos_token_id": 2,
    }
    required: ClassVar[Mapping[str, Any]] = {**AFFINE, "layerdrop": 0.0}
    readable: ClassVar[tuple[str, ...]] = ("OPTForCausalLM", "OPTModel")

    def misfits(self, config: ModelConfig) -> Iterator[str]:
        if config.shape != "decoder":
            yield "it is no decoder"
        if not is_plain(config, Plan(out_norm=NORM)) and not is_plain(config, Plan(pre_norm=NORM)):
            yield f"its layers are neither plain Post-LN nor plain Pre-LN: {config.recipe.equation}"
        if config.final_norm is False:
            yield "it has no final norm"
        if config.positions != "learned":
            yield f"its positions are {config.positions}, and OPT's are learned"
        if config.scale_embeddings:
            yield "its embeddings are scaled"
        if config.decoder_first_eps is not None:
            yield "its first norm has an eps of its own"
        if config.output_bias:
            yield "it has an output bias"
        yield from shared_misfits(config)

    def foreign_config(self, config: ModelConfig) -> dict[str, Any]:
        return {
            **super().foreign_config(config),
            "num_hidden_layers": config.depths.decoder,
            "do_layer_norm_before": is_plain(config, Plan(pre_norm=NORM)),
            **AFFINE,
        }

    def own_options(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **super().own_options(theirs),
            "shape": "decoder",
            "recipe": recipes.PLAIN_PRE if theirs.get("do_layer_norm_before", True) else recipes.PLAIN,
            "layers": theirs["num_hidden_layers"],
            "positions": "learned",
            "scale_embeddings": False,
            "pad_id": None,
        }

    def entries(self, config: ModelConfig) -> list[Entry]:
        before = is_plain(config, Plan(pre_norm=NORM))
        found = [
            Entry("embedding.weight", ("model.decoder.embed_tokens.weight",)),
            Entry("decoder.positions.at_input.weight", ("model.decoder.embed_positions.weight",), rows_before=ROWS_BEFORE),
        ]
        for index in range(config.depths.decoder):
            ours, theirs = f"decoder.blocks.{index}", f"model.decoder.layers.{index}"
            found += layer_entries(ours, theirs, "pre_norm" if before else "out_norm", reads_memory=False)
        if before:
            found += norm("decoder.top_norm", "model.decoder.final_layer_norm")
        if not config.tie_embeddings:
            found.append(Entry("vocabulary.weight", ("lm_head.weight",)))
        return found

    def copies(self, config: ModelConfig) -> dict[str, str]:
        return {"lm_head.weight": "model.decoder.embed_tokens.weight"} if config.tie_embeddings else {}
