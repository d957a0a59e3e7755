"""Pre-LN decoders with learned positions as `GPT2LMHeadModel`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from kilolayer import recipes
from kilolayer.huggingface.foreign_class import ForeignClass, is_plain, layer_misfits
from kilolayer.huggingface.weights import Entry, linear, norm
from kilolayer.models.config import ModelConfig
from kilolayer.recipes.base import NORM, Plan


class GPT2(ForeignClass):
    """x + f(LN(x)) in every sublayer and a final norm; matrices are stored as [inputs, outputs]."""

    model_type: ClassVar[str] = "gpt2"
    architecture: ClassVar[str] = "GPT2LMHeadModel"
    options: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vocab_size": ("vocab_size",),
        "max_length": ("n_positions",),
        "dim": ("n_embd",),
        "heads": ("n_head",),
        "ffn_dim": ("n_inner",),
        "activation": ("activation_function",),
        "norm_eps": ("layer_norm_epsilon",),
        "dropout": ("resid_pdrop", "embd_pdrop"),
        "attention_dropout": ("attn_pdrop",),
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "eos_token_id": 50256,
    }
    required: ClassVar[Mapping[str, Any]] = {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }
    readable: ClassVar[tuple[str, ...]] = ("GPT2LMHeadModel", "GPT2Model")
    prefix: ClassVar[str] = "transformer."
    unread: ClassVar[str] = r"transformer\.h\.\d+\.attn\.(masked_)?bias"

    def misfits(self, config: ModelConfig) -> Iterator[str]:
        if config.shape != "decoder":
            yield "it is no decoder"
        if not is_plain(config, Plan(pre_norm=NORM)) or config.final_norm is False:
            yield f"its layers are not plain Pre-LN with a norm on top: {config.recipe.equation}"
        if config.positions != "learned":
            yield f"its positions are {config.positions}, and GPT-2's are learned"
        if config.scale_embeddings:
            yield "it multiplies embeddings by sqrt(dim)"
        if config.activation_dropout or config.drop_path:
            yield "it has activation_dropout or drop_path"
        yield from layer_misfits(config)
        if config.embedding_norm or config.output_bias or config.first_predicted:
            yield "it has embedding_norm, output_bias or first_predicted"

    def foreign_config(self, config: ModelConfig) -> dict[str, Any]:
        more = {"n_layer": config.depths.decoder, "tie_word_embeddings": bool(config.tie_embeddings)}
        return {**super().foreign_config(config), **more}

    def own_options(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        inner = theirs.get("n_inner")
        return {
            **super().own_options({**theirs, "n_inner": 4 * theirs["n_embd"] if inner is None else inner}),
            "shape": "decoder",
            "recipe": recipes.PLAIN_PRE,
            "layers": theirs["n_layer"],
            "positions": "learned",
            "pad_id": theirs.get("pad_token_id"),
            "scale_embeddings": False,
            "tie_embeddings": theirs.get("tie_word_embeddings", True),
        }

    def entries(self, config: ModelConfig) -> list[Entry]:
        found = [
            Entry("embedding.weight", ("transformer.wte.weight",)),
            Entry("decoder.positions.at_input.weight", ("transformer.wpe.weight",)),
            *norm("decoder.top_norm", "transformer.ln_f"),
        ]
        if not config.tie_embeddings:
            found.append(Entry("vocabulary.weight", ("lm_head.weight",)))
        for index in range(config.depths.decoder):
            ours, theirs = f"decoder.blocks.{index}", f"transformer.h.{index}"
            found += [
                *norm(f"{ours}.self_attention.pre_norm", f"{theirs}.ln_1"),
                *linear(f"{ours}.self_attention.f.query_key_value", f"{theirs}.attn.c_attn", transposed=True),
                *linear(f"{ours}.self_attention.f.output", f"{theirs}.attn.c_proj", transposed=True),
                *norm(f"{ours}.feedforward.pre_norm", f"{theirs}.ln_2"),
                *linear(f"{ours}.feedforward.f.input", f"{theirs}.mlp.c_fc", transposed=True),
                *linear(f"{ours}.feedforward.f.output", f"{theirs}.mlp.c_proj", transposed=True),
            ]
        return found

    def copies(self, config: ModelConfig) -> dict[str, str]:
        return {"lm_head.weight": "transformer.wte.weight"} if config.tie_embeddings else {}
