"""Pre-LN decoders with RMSNorm, normalized queries and keys, rotary positions and SwiGLU as `Qwen3ForCausalLM`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from kilolayer import recipes
from kilolayer.errors import InputError, shown
from kilolayer.huggingface.foreign_class import ForeignClass, is_plain
from kilolayer.huggingface.weights import Entry
from kilolayer.layers.norms.base import norm_class
from kilolayer.layers.position import ROTARY_BASE
from kilolayer.models.config import ModelConfig
from kilolayer.recipes.base import NORM, Plan


class Qwen3(ForeignClass):
    """x + f(RMSNorm(x)) in every sublayer and a final norm; no projection has a bias."""

    model_type: ClassVar[str] = "qwen3"
    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    options: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vocab_size": ("vocab_size",),
        "dim": ("hidden_size",),
        "heads": ("num_attention_heads",),
        "ffn_dim": ("intermediate_size",),
        "norm_eps": ("rms_norm_eps",),
        "attention_dropout": ("attention_dropout",),
        "tie_embeddings": ("tie_word_embeddings",),
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    }
    required: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "rope_scaling": None,
    }
    readable: ClassVar[tuple[str, ...]] = ("Qwen3ForCausalLM", "Qwen3Model")

    def misfits(self, config: ModelConfig) -> Iterator[str]:
        if config.shape != "decoder":
            yield "it is no decoder"
        if is_plain(config, Plan(pre_norm=NORM)):
            yield "its projections have biases"
        elif not is_plain(config, Plan(pre_norm=NORM, bias=False)):
            yield f"its layers are not plain Pre-LN with a norm on top: {config.recipe.equation}"
        if config.final_norm is False:
            yield "it has no final norm"
        if config.positions != "rotary":
            yield f"its positions are {config.positions}, and Qwen3's are rotary"
        if config.norm != "rms":
            yield f"its norms are {norm_class(config.norm).words()}"
        if config.decoder_first_eps is not None:
            yield "its first norm has an eps of its own"
        if not config.qk_norm:
            yield "its queries and keys are not normalized (qk_norm)"
        if config.activation != "swiglu":
            yield f"its activation is {config.activation}"
        if config.scale_embeddings:
            yield "it multiplies embeddings by sqrt(dim)"
        if config.dropout or config.activation_dropout or config.drop_path:
            yield "it has dropout, activation_dropout or drop_path"
        if config.moe is not None:
            yield "it has experts"
        if config.embedding_norm or config.output_bias or config.first_predicted:
            yield "it has embedding_norm, output_bias or first_predicted"

    def foreign_config(self, config: ModelConfig) -> dict[str, Any]:
        return {
            **super().foreign_config(config),
            "num_hidden_layers": config.depths.decoder,
            "num_key_value_heads": config.key_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "use_sliding_window": False,
            "rope_theta": ROTARY_BASE,
            "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
        }

    def own_options(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        dim, heads, head_dim = (theirs[name] for name in ("hidden_size", "num_attention_heads", "head_dim"))
        whole = all(isinstance(each, int) for each in (dim, heads, head_dim))  # a text times a number may be huge
        if head_dim is not None and not (whole and head_dim * heads == dim):
            raise InputError(
                f"head_dim is {shown(head_dim)}, and hidden_size / num_attention_heads {shown(dim)} / {shown(heads)}",
                where="config.json",
                fix="only heads that have the width of the model together are supported",
            )
        self._check_attention(theirs)
        return {
            **super().own_options(theirs),
            "shape": "decoder",
            "recipe": recipes.get(recipes.PLAIN_PRE, bias=False),
            "layers": theirs["num_hidden_layers"],
            "kv_heads": theirs["num_key_value_heads"],
            "positions": "rotary",
            "norm": "rms",
            "qk_norm": True,
            "activation": "swiglu",
            "scale_embeddings": False,
            "pad_id": None,
        }

    def _check_attention(self, theirs: Mapping[str, Any]) -> None:
        """Raise if an option of positions or of layers has no counterpart."""
        rotary = theirs.get("rope_parameters") or {"rope_theta": theirs.get("rope_theta", ROTARY_BASE)}
        kinds = theirs.get("layer_types") or []
        faults = (
            (
                not isinstance(rotary, Mapping) or rotary.get("rope_type", "default") != "default",
                "rope_parameters",
                "only rope_type default is supported",
            ),
            (
                isinstance(rotary, Mapping) and rotary.get("rope_theta", ROTARY_BASE) != ROTARY_BASE,
                "rope_parameters",
                f"only a rope_theta of {ROTARY_BASE:,.0f} is supported",
            ),
            (kinds != ["full_attention"] * len(kinds), "layer_types", "only full_attention is supported"),
        )
        for wrong, name, fix in faults:
            if wrong:
                raise InputError(
                    f"{name} is {shown(rotary if name == 'rope_parameters' else kinds)}", where="config.json", fix=fix
                )

    def entries(self, config: ModelConfig) -> list[Entry]:
        rows = (config.dim, *[config.key_heads * config.head_dim] * 2)
        found = [Entry("embedding.weight", ("model.embed_tokens.weight",)), _weight("decoder.top_norm", "model.norm")]
        if not config.tie_embeddings:
            found.append(_weight("vocabulary", "lm_head"))
        for index in range(config.depths.decoder):
            attention, network = (f"decoder.blocks.{index}.{part}" for part in ("self_attention", "feedforward"))
            theirs = f"model.layers.{index}"
            found += [
                _weight(f"{attention}.pre_norm", f"{theirs}.input_layernorm"),
                _weight(f"{attention}.f.query_key_value", *(f"{theirs}.self_attn.{part}_proj" for part in "qkv"), rows=rows),
                _weight(f"{attention}.f.query_norm", f"{theirs}.self_attn.q_norm"),
                _weight(f"{attention}.f.key_norm", f"{theirs}.self_attn.k_norm"),
                _weight(f"{attention}.f.output", f"{theirs}.self_attn.o_proj"),
                _weight(f"{network}.pre_norm", f"{theirs}.post_attention_layernorm"),
                _weight(f"{network}.f.input", f"{theirs}.mlp.gate_proj", f"{theirs}.mlp.up_proj"),
                _weight(f"{network}.f.output", f"{theirs}.mlp.down_proj"),
            ]
        return found

    def copies(self, config: ModelConfig) -> dict[str, str]:
        return {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_embeddings else {}


def _weight(ours: str, *theirs: str, rows: tuple[int, ...] = ()) -> Entry:
    return Entry(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), rows=rows)
