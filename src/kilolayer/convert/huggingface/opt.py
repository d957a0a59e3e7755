"""Decoders as `OPTForCausalLM`, which has both places of the norm: learned positions, embeddings as the table holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from kilolayer import recipes
from kilolayer.convert.huggingface.foreign_class import ForeignClass, is_plain, shared_misfits
from kilolayer.convert.huggingface.marian import layer_entries
from kilolayer.convert.huggingface.weights import Entry, norm
from kilolayer.errors import InputError
from kilolayer.models.config import ModelConfig
from kilolayer.recipes.base import Plan

ROWS_BEFORE = 2
"""OPT's table of positions begins with two rows that none of its positions has."""
REQUIRED = {"_remove_final_layer_norm": False, "enable_bias": True, "layer_norm_elementwise_affine": True}
"""What our models always are."""


class OPT(ForeignClass):
    """LN(x + f(x)), or x + f(LN(x)) with LN on top."""

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

    def misfits(self, config: ModelConfig) -> Iterator[str]:
        if config.shape != "decoder":
            yield "it is no decoder"
        if not is_plain(config, Plan(out_norm=True)) and not is_plain(config, Plan(pre_norm=True)):
            yield f"its layers are neither plain Post-LN nor plain Pre-LN: {config.recipe.equation}"
        if config.final_norm is False:
            yield "it has no final norm"
        if config.positions != "learned":
            yield f"its positions are {config.positions}, and OPT's are learned"
        if config.scale_embeddings:
            yield "its embeddings are scaled"
        if config.decoder_first_eps is not None:
            yield "its first norm has an eps of its own"
        yield from shared_misfits(config)

    def foreign_config(self, config: ModelConfig) -> dict[str, Any]:
        return {
            **super().foreign_config(config),
            "num_hidden_layers": config.depths.decoder,
            "do_layer_norm_before": is_plain(config, Plan(pre_norm=True)),
            **REQUIRED,
        }

    def own_options(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        for name, value in REQUIRED.items():
            if theirs.get(name, value) != value:
                raise InputError(f"{name} is {theirs[name]}", where="config.json", fix="a model of ours has no such form")
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
        before = is_plain(config, Plan(pre_norm=True))
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
