"""Post-LN encoders with a norm on their embeddings as BERT: the base model, with a masked-language-model head, or a
classifier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor

from kilolayer import recipes
from kilolayer.huggingface.foreign_class import ForeignClass, is_plain, layer_misfits
from kilolayer.huggingface.weights import Entry, linear, norm
from kilolayer.models.config import ModelConfig
from kilolayer.models.head import Head
from kilolayer.recipes.base import NORM, Plan

EMBEDDINGS, MASKED, POOLER, CLASSIFIER = "bert.embeddings", "cls.predictions", "bert.pooler.dense", "classifier"


class Bert(ForeignClass):
    """LN(x + f(x)) in every sublayer; the input is the normed sum of token, type and position embeddings."""

    model_type: ClassVar[str] = "bert"
    architecture: ClassVar[str] = "BertForMaskedLM"
    options: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vocab_size": ("vocab_size",),
        "max_length": ("max_position_embeddings",),
        "token_types": ("type_vocab_size",),
        "dim": ("hidden_size",),
        "heads": ("num_attention_heads",),
        "ffn_dim": ("intermediate_size",),
        "activation": ("hidden_act",),
        "norm_eps": ("layer_norm_eps",),
        "dropout": ("hidden_dropout_prob",),
        "attention_dropout": ("attention_probs_dropout_prob",),
        "pad_id": ("pad_token_id",),
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "pad_token_id": 0,
    }
    required: ClassVar[Mapping[str, Any]] = {
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
    }
    readable: ClassVar[tuple[str, ...]] = (
        "BertForMaskedLM",
        "BertForPreTraining",
        "BertForSequenceClassification",
        "BertModel",
    )
    prefix: ClassVar[str] = "bert."
    outputs: ClassVar[tuple[str, ...]] = ("cls.", "classifier.")
    unread: ClassVar[str] = r"bert\.embeddings\.position_ids|cls\.seq_relationship\..*|bert\.pooler\..*"

    def misfits(self, config: ModelConfig) -> Iterator[str]:
        if config.shape != "encoder" or config.vocab_size is None:
            yield "it is no encoder with a vocabulary"
        if not is_plain(config, Plan(out_norm=NORM)):
            yield f"its layers are not plain Post-LN: {config.recipe.equation}"
        if config.positions != "learned":
            yield f"its positions are {config.positions}, and BERT's are learned"
        if not config.embedding_norm:
            yield "it has no norm on its embeddings"
        if config.token_types is None:
            yield "it has no token types"
        if config.scale_embeddings:
            yield "it multiplies embeddings by sqrt(dim)"
        if config.head is None and not (config.output_transform and config.output_bias):
            yield "it has no output_transform with output_bias, and no head"
        if config.head is not None and config.head.pool != "first":
            yield f"its head reads the {config.head.pool} of all states, and BERT's the first"
        if config.activation_dropout or config.drop_path:
            yield "it has activation_dropout or drop_path"
        yield from layer_misfits(config)
        if config.first_predicted:
            yield f"its first {config.first_predicted} tokens have no probability"

    def foreign_config(self, config: ModelConfig) -> dict[str, Any]:
        found = {**super().foreign_config(config), "num_hidden_layers": config.depths.encoder}
        if config.head is None:
            return {**found, "tie_word_embeddings": bool(config.tie_embeddings)}
        labels = {str(index): f"LABEL_{index}" for index in range(config.head.outputs)}
        return {
            **found,
            "architectures": ["BertForSequenceClassification"],
            "classifier_dropout": config.head.dropout,
            "id2label": labels,
            "label2id": {name: int(index) for index, name in labels.items()},
            # Without it, a pipeline of Transformers applies the sigmoid to the number.
            **({"problem_type": "regression"} if config.head.outputs == 1 else {}),
        }

    def own_options(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **super().own_options(theirs),
            "shape": "encoder",
            "recipe": recipes.PLAIN,
            "layers": theirs["num_hidden_layers"],
            "positions": "learned",
            "embedding_norm": True,
            "scale_embeddings": False,
            "tie_embeddings": theirs.get("tie_word_embeddings", True),
        }

    def options_of_weights(self, tensors: Mapping[str, Tensor], theirs: Mapping[str, Any]) -> dict[str, Any]:
        if f"{CLASSIFIER}.weight" in tensors:
            outputs, *_ = (*tensors[f"{CLASSIFIER}.weight"].shape, 1)  # one of another rank is refused when all are checked
            dropout = theirs.get("classifier_dropout")
            head = Head(outputs=outputs, dropout=theirs["hidden_dropout_prob"] if dropout is None else dropout)
            return {"head": head, "tie_embeddings": True}
        masked = f"{MASKED}.transform.dense.weight" in tensors
        untied = {} if masked else {"tie_embeddings": True}
        return {"output_transform": masked, "output_bias": masked, **untied}

    def entries(self, config: ModelConfig) -> list[Entry]:
        found = [
            Entry("embedding.weight", (f"{EMBEDDINGS}.word_embeddings.weight",)),
            Entry("token_types.weight", (f"{EMBEDDINGS}.token_type_embeddings.weight",)),
            Entry("encoder.positions.at_input.weight", (f"{EMBEDDINGS}.position_embeddings.weight",)),
            *norm("encoder.input_norm", f"{EMBEDDINGS}.LayerNorm"),
        ]
        for index in range(config.depths.encoder):
            ours, theirs = f"encoder.blocks.{index}", f"bert.encoder.layer.{index}"
            heads = [f"{theirs}.attention.self.{part}" for part in ("query", "key", "value")]
            found += [
                *linear(f"{ours}.self_attention.f.query_key_value", *heads),
                *linear(f"{ours}.self_attention.f.output", f"{theirs}.attention.output.dense"),
                *norm(f"{ours}.self_attention.out_norm", f"{theirs}.attention.output.LayerNorm"),
                *linear(f"{ours}.feedforward.f.input", f"{theirs}.intermediate.dense"),
                *linear(f"{ours}.feedforward.f.output", f"{theirs}.output.dense"),
                *norm(f"{ours}.feedforward.out_norm", f"{theirs}.output.LayerNorm"),
            ]
        if config.head is not None:
            return [*found, *linear("head.dense", POOLER), *linear("head.output", CLASSIFIER)]
        if config.output_transform:
            found += linear("transform.dense", f"{MASKED}.transform.dense")
            found += norm("transform.norm", f"{MASKED}.transform.LayerNorm")
        if config.output_bias:
            found.append(Entry("output_bias.weight", (_bias(config),)))
        if not config.tie_embeddings:
            found.append(Entry("vocabulary.weight", (f"{MASKED}.decoder.weight",)))
        return found

    def spare_entries(self, config: ModelConfig) -> list[Entry]:
        return [] if config.head is not None else linear("head.dense", POOLER)

    def copies(self, config: ModelConfig) -> dict[str, str]:
        names = {f"{MASKED}.bias", f"{MASKED}.decoder.bias"} - {_bias(config)}
        table = {f"{MASKED}.decoder.weight": f"{EMBEDDINGS}.word_embeddings.weight"} if config.tie_embeddings else {}
        return {**dict.fromkeys(names, _bias(config)), **table}


def _bias(config: ModelConfig) -> str:
    """The name of the output bias in use: an untied output has its own, and the other bias is then unused."""
    return f"{MASKED}.bias" if config.tie_embeddings else f"{MASKED}.decoder.bias"
