"""The supported layer classes, and how each is read. Transformers is never imported: its classes are recognized by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from kilolayer.errors import InputError
from kilolayer.models.adapt.sublayers import ForeignSublayer, Matrix, attention_matrices, feedforward_matrices
from kilolayer.models.sharded import plain_class
from kilolayer.recipes.base import Kind, Side
from kilolayer.recipes.role import Role

SELF, CROSS, FFN = Kind.SELF_ATTENTION, Kind.CROSS_ATTENTION, Kind.FEEDFORWARD


@dataclass(frozen=True)
class EmbeddingNorm:
    """A norm on the embeddings whose output is the input of the first layer.

    classes: of the module that calls both, "", and of its parts by their names; another class may change the state in between.
    norm, layers: the names of the norm and of the list of layers in that module.
    """

    classes: Mapping[str, str]
    norm: str
    layers: str


@dataclass(frozen=True)
class Layout:
    """How layers of one class are read.

    read: from a layer to its sublayers, in order.
    norm_first: whether the norms come before f (Pre-LN) or after the sum (Post-LN).
    side: encoder or decoder.
    embedding_norm: that of the models that Transformers builds from these layers.
    """

    title: str
    read: Callable[[Any], list[ForeignSublayer]]
    norm_first: Callable[[Any], bool]
    side: Callable[[Any], Side]
    embedding_norm: EmbeddingNorm | None = None


def _torch_attention(kind: Kind, attention: nn.MultiheadAttention, norm: nn.Module) -> ForeignSublayer:
    others = ("bias_k", "bias_v", "out_proj.weight", "out_proj.bias")
    fused: dict[str, Any] = {"weight": "in_proj_weight", "bias": "in_proj_bias", "parts": 3, "others": others}
    reads = kind is SELF
    matrices = (
        Matrix(attention, Role.QUERY_KEY, part=0, **fused),
        Matrix(attention, Role.QUERY_KEY, part=1, reads=reads, **fused),
        Matrix(attention, Role.VALUE, part=2, reads=reads, **fused),
        Matrix(attention.out_proj, Role.ATTENTION_OUTPUT),
    )
    # nn.MultiheadAttention reads the weights of its out_proj without calling it.
    return ForeignSublayer(kind, attention, attention, norm, matrices, attention.num_heads)


def _torch_feedforward(layer: Any, norm: nn.Module) -> ForeignSublayer:
    matrices = feedforward_matrices(layer.linear1, output=layer.linear2)
    return ForeignSublayer(FFN, layer.linear1, layer.linear2, norm, matrices)


def _torch_encoder(layer: Any) -> list[ForeignSublayer]:
    return [_torch_attention(SELF, layer.self_attn, layer.norm1), _torch_feedforward(layer, layer.norm2)]


def _torch_decoder(layer: Any) -> list[ForeignSublayer]:
    own = _torch_attention(SELF, layer.self_attn, layer.norm1)
    cross = _torch_attention(CROSS, layer.multihead_attn, layer.norm2)
    return [own, cross, _torch_feedforward(layer, layer.norm3)]


def _bert(layer: Any) -> list[ForeignSublayer]:
    _refuse_cross_attention(layer, "BERT")
    attention, output = layer.attention.self, layer.attention.output
    matrices = attention_matrices(attention.query, attention.key, attention.value, output.dense)
    first = ForeignSublayer(SELF, attention, output.dense, output.LayerNorm, matrices, attention.num_attention_heads)
    network = feedforward_matrices(layer.intermediate.dense, output=layer.output.dense)
    return [first, ForeignSublayer(FFN, layer.intermediate, layer.output.dense, layer.output.LayerNorm, network)]


def _bart_attention(kind: Kind, attention: Any, norm: nn.Module) -> ForeignSublayer:
    matrices = attention_matrices(attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj, cross=kind is CROSS)
    return ForeignSublayer(kind, attention, attention.out_proj, norm, matrices, attention.num_heads)


def _bart_feedforward(layer: Any) -> ForeignSublayer:
    return ForeignSublayer(FFN, layer.fc1, layer.fc2, layer.final_layer_norm, feedforward_matrices(layer.fc1, output=layer.fc2))


def _bart_encoder(layer: Any) -> list[ForeignSublayer]:
    return [_bart_attention(SELF, layer.self_attn, layer.self_attn_layer_norm), _bart_feedforward(layer)]


def _bart_decoder(layer: Any) -> list[ForeignSublayer]:
    own = _bart_attention(SELF, layer.self_attn, layer.self_attn_layer_norm)
    cross = _bart_attention(CROSS, layer.encoder_attn, layer.encoder_attn_layer_norm)
    return [own, cross, _bart_feedforward(layer)]


def _gpt2(layer: Any) -> list[ForeignSublayer]:
    _refuse_cross_attention(layer, "GPT-2")
    attention, mlp = layer.attn, layer.mlp
    roles = (Role.QUERY_KEY, Role.QUERY_KEY, Role.VALUE)
    reading = (Matrix(attention.c_attn, role, part=part, parts=3, transposed=True) for part, role in enumerate(roles))
    matrices = (*reading, Matrix(attention.c_proj, Role.ATTENTION_OUTPUT, transposed=True))
    network = feedforward_matrices(mlp.c_fc, output=mlp.c_proj, transposed=True)
    return [
        ForeignSublayer(SELF, attention, attention.c_proj, layer.ln_1, matrices, attention.num_heads),
        ForeignSublayer(FFN, mlp, mlp.c_proj, layer.ln_2, network),
    ]


def _llama(layer: Any) -> list[ForeignSublayer]:
    attention, mlp = layer.self_attn, layer.mlp
    matrices = attention_matrices(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    heads = attention.o_proj.in_features // attention.head_dim
    network = feedforward_matrices(mlp.gate_proj, mlp.up_proj, output=mlp.down_proj)
    return [
        ForeignSublayer(SELF, attention, attention.o_proj, layer.input_layernorm, matrices, heads),
        ForeignSublayer(FFN, mlp, mlp.down_proj, layer.post_attention_layernorm, network),
    ]


def _t5_attention(kind: Kind, attention: Any, norm: nn.Module) -> ForeignSublayer:
    # T5 does not divide its attention scores by sqrt(head width); instead its queries start smaller by that factor.
    matrices = attention_matrices(
        attention.q,
        attention.k,
        attention.v,
        attention.o,
        cross=kind is CROSS,
        query_start=attention.key_value_proj_dim**-0.5,
    )
    return ForeignSublayer(kind, attention, attention.o, norm, matrices, attention.n_heads)


def _t5(block: Any) -> list[ForeignSublayer]:
    first, *cross, last = block.layer
    network = last.DenseReluDense
    inputs = (network.wi,) if hasattr(network, "wi") else (network.wi_0, network.wi_1)
    matrices = feedforward_matrices(*inputs, output=network.wo)
    return [
        _t5_attention(SELF, first.SelfAttention, first.layer_norm),
        *(_t5_attention(CROSS, each.EncDecAttention, each.layer_norm) for each in cross),
        ForeignSublayer(FFN, network, network.wo, last.layer_norm, matrices),
    ]


def _vit(layer: Any) -> list[ForeignSublayer]:
    if hasattr(layer, "mlp"):
        attention, output, heads = layer.attention, layer.attention.o_proj, layer.attention.num_attention_heads
        matrices = attention_matrices(attention.q_proj, attention.k_proj, attention.v_proj, output)
        network, first, last = layer.mlp, layer.mlp.fc1, layer.mlp.fc2
    else:  # earlier releases of Transformers 5
        attention, output = layer.attention.attention, layer.attention.output.dense
        heads = attention.num_attention_heads
        matrices = attention_matrices(attention.query, attention.key, attention.value, output)
        network, first, last = layer.intermediate, layer.intermediate.dense, layer.output.dense
    return [
        ForeignSublayer(SELF, attention, output, layer.layernorm_before, matrices, heads),
        ForeignSublayer(FFN, network, last, layer.layernorm_after, feedforward_matrices(first, output=last)),
    ]


def _refuse_cross_attention(layer: Any, title: str) -> None:
    if hasattr(layer, "crossattention"):
        raise InputError(
            f"{title} with cross-attention is not supported",
            fix="adapt a model without add_cross_attention, or use BART, Marian, T5 or nn.Transformer",
        )


def _bert_norm(title: str) -> EmbeddingNorm:
    classes = {"": f"{title}Model", "embeddings": f"{title}Embeddings", "encoder": f"{title}Encoder"}
    return EmbeddingNorm(classes, norm="embeddings.LayerNorm", layers="encoder.layer")


def _bart_norm(cls: str) -> EmbeddingNorm:
    return EmbeddingNorm({"": cls}, norm="layernorm_embedding", layers="layers")


def _side(side: Side) -> Callable[[Any], Side]:
    return lambda layer: side


def _pre(layer: Any) -> bool:
    return True


def _post(layer: Any) -> bool:
    return False


def _own_norm_first(layer: Any) -> bool:
    return layer.norm_first


LAYOUTS: dict[tuple[str, str], Layout] = {
    ("torch.nn.modules.transformer", "TransformerEncoderLayer"): Layout(
        "nn.TransformerEncoder", _torch_encoder, _own_norm_first, _side("encoder")
    ),
    ("torch.nn.modules.transformer", "TransformerDecoderLayer"): Layout(
        "nn.TransformerDecoder", _torch_decoder, _own_norm_first, _side("decoder")
    ),
    ("transformers.models.bert.modeling_bert", "BertLayer"): Layout("BERT", _bert, _post, _side("encoder"), _bert_norm("Bert")),
    ("transformers.models.roberta.modeling_roberta", "RobertaLayer"): Layout(
        "RoBERTa", _bert, _post, _side("encoder"), _bert_norm("Roberta")
    ),
    ("transformers.models.bart.modeling_bart", "BartEncoderLayer"): Layout(
        "BART", _bart_encoder, _post, _side("encoder"), _bart_norm("BartEncoder")
    ),
    ("transformers.models.bart.modeling_bart", "BartDecoderLayer"): Layout(
        "BART", _bart_decoder, _post, _side("decoder"), _bart_norm("BartDecoder")
    ),
    ("transformers.models.marian.modeling_marian", "MarianEncoderLayer"): Layout(
        "Marian", _bart_encoder, _post, _side("encoder")
    ),
    ("transformers.models.marian.modeling_marian", "MarianDecoderLayer"): Layout(
        "Marian", _bart_decoder, _post, _side("decoder")
    ),
    ("transformers.models.gpt2.modeling_gpt2", "GPT2Block"): Layout("GPT-2", _gpt2, _pre, _side("decoder")),
    ("transformers.models.llama.modeling_llama", "LlamaDecoderLayer"): Layout("Llama", _llama, _pre, _side("decoder")),
    ("transformers.models.t5.modeling_t5", "T5Block"): Layout(
        "T5", _t5, _pre, lambda block: "decoder" if block.is_decoder else "encoder"
    ),
    ("transformers.models.vit.modeling_vit", "ViTLayer"): Layout("ViT", _vit, _pre, _side("encoder")),
}

KNOWN = ("nn.Transformer", *dict.fromkeys(layout.title for layout in LAYOUTS.values()))


def layout_of(layer: nn.Module) -> Layout | None:
    """How a layer is read; None if its class is unknown, or overrides forward."""
    own = plain_class(layer)
    for cls in own.__mro__:
        layout = LAYOUTS.get((cls.__module__, cls.__name__))
        if layout is not None and own.forward is cls.forward:
            return layout
    return None
