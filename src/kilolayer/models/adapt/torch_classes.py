"""torch's Transformer classes as data: the options from which the same model is built again."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch.nn.functional as F
from torch import nn

from kilolayer.config import bounded, check, table_of
from kilolayer.config import build as build_config
from kilolayer.errors import InputError, OptionError
from kilolayer.models.adapt.additions import Additions
from kilolayer.models.adapt.stacks import check_depth
from kilolayer.models.sharded import plain_class
from kilolayer.recipes.base import DEEPEST

NAME = "torch"
"""The `model_type` of torch's classes in config.json."""
ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu}
LAYERS = {"TransformerEncoder": nn.TransformerEncoderLayer, "TransformerDecoder": nn.TransformerDecoderLayer}
WIDEST = 2**24
OWN_MODULE = "save model.state_dict(), and load it into a model that you have built and adapted with start=False"


@dataclass(frozen=True)
class LayerTable:
    """The arguments of `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer`."""

    d_model: int = bounded(512, least=1, most=WIDEST)
    nhead: int = bounded(8, least=1, most=WIDEST)
    dim_feedforward: int = bounded(2048, least=1, most=WIDEST)
    dropout: float = bounded(0.1, least=0, most=1)
    activation: Literal["relu", "gelu"] = "relu"
    layer_norm_eps: float = bounded(1e-5, least=0)
    batch_first: bool = False
    norm_first: bool = False
    bias: bool = True

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def of(cls, layer: Any) -> LayerTable:
        """The options of a layer, without what a recipe changed."""
        activation: Any = next((name for name, function in ACTIVATIONS.items() if layer.activation is function), None)
        if activation is None:
            raise InputError(
                "the activation of a layer is a function that no file can name",
                where=type(layer).__name__,
                fix=f"build the model with one of torch's: {', '.join(ACTIVATIONS)}",
            )
        return cls(
            d_model=layer.self_attn.embed_dim,
            nhead=layer.self_attn.num_heads,
            dim_feedforward=layer.linear1.out_features,
            dropout=layer.dropout.p,
            activation=activation,
            layer_norm_eps=_unchanged(layer, layer.norm1, "eps"),
            batch_first=layer.self_attn.batch_first,
            norm_first=layer.norm_first,
            bias=layer.linear1.bias is not None,
        )


@dataclass(frozen=True)
class NormTable:
    """The arguments of a stack's final `nn.LayerNorm`."""

    eps: float = bounded(1e-5, least=0)
    bias: bool = True

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class StackTable:
    """The arguments of `nn.TransformerEncoder` and `nn.TransformerDecoder`; the last two are the encoder's."""

    layer: LayerTable = LayerTable()
    num_layers: int = bounded(6, least=1, most=DEEPEST)
    norm: NormTable | None = None
    enable_nested_tensor: bool = True
    mask_check: bool = True

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def of(cls, stack: Any) -> StackTable:
        """The options of a stack, without what a recipe changed."""
        layers, norm = {LayerTable.of(layer) for layer in stack.layers}, stack.norm
        if len(layers) > 1 or not isinstance(norm, nn.LayerNorm | None):
            what = "has layers with different options" if len(layers) > 1 else f"ends with a {type(norm).__name__}"
            raise InputError(f"the stack {what}, which its class cannot build", where=type(stack).__name__, fix=OWN_MODULE)
        first = stack.layers[0]
        return cls(
            layers.pop(),
            len(stack.layers),
            None if norm is None else NormTable(norm.eps, norm.bias is not None),
            bool(_unchanged(first, stack, "enable_nested_tensor", True)),
            bool(getattr(stack, "mask_check", True)),
        )

    def build(self, kind: str) -> Any:
        """A stack with these options."""
        layer = LAYERS[kind](**table_of(self.layer))
        norm = None if self.norm is None else nn.LayerNorm(self.layer.d_model, **table_of(self.norm))
        if kind == "TransformerDecoder":
            return nn.TransformerDecoder(layer, self.num_layers, norm)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nested tensors are not used for such layers
            return nn.TransformerEncoder(layer, self.num_layers, norm, self.enable_nested_tensor, self.mask_check)


@dataclass(frozen=True)
class ModelTable:
    """One of torch's classes: a stack, or an `nn.Transformer` of two."""

    encoder: StackTable | None = None
    decoder: StackTable | None = None

    def __post_init__(self) -> None:
        check(self)
        if self.encoder is None and self.decoder is None:
            raise OptionError("there is neither an encoder nor a decoder", fix="restore the file")

    def build(self) -> nn.Module:
        """A model with these options; its weights are of no use."""
        stacks: dict[str, StackTable | None] = {"TransformerEncoder": self.encoder, "TransformerDecoder": self.decoder}
        built = [table.build(kind) for kind, table in stacks.items() if table is not None]
        if len(built) == 1:
            return built[0]
        encoder, decoder = built
        layer = decoder.layers[0].self_attn
        sizes: dict[str, Any] = {"d_model": layer.embed_dim, "nhead": layer.num_heads, "batch_first": layer.batch_first}
        return nn.Transformer(**sizes, custom_encoder=encoder, custom_decoder=decoder)


def describe(model: nn.Module) -> dict[str, Any] | None:
    """The options of a model of torch; None if it is none."""
    owner: Any = model
    cls = plain_class(model)
    if cls is nn.TransformerEncoder:
        found = ModelTable(encoder=StackTable.of(owner))
    elif cls is nn.TransformerDecoder:
        found = ModelTable(decoder=StackTable.of(owner))
    elif cls is nn.Transformer and {type(owner.encoder), type(owner.decoder)} == {
        nn.TransformerEncoder,
        nn.TransformerDecoder,
    }:
        found = ModelTable(StackTable.of(owner.encoder), StackTable.of(owner.decoder))
    else:
        return None
    return {"model_type": NAME, "architectures": [cls.__name__], **table_of(found)}


def build(table: dict[str, Any], most_layers: int) -> nn.Module:
    """The model that `describe` described. most_layers: raise if a stack has more."""
    options = {name: value for name, value in table.items() if name not in ("model_type", "architectures")}
    found = build_config(ModelTable, options)
    check_depth(max(stack.num_layers for stack in (found.encoder, found.decoder) if stack is not None), most_layers)
    return found.build()


def _unchanged(layer: nn.Module, owner: nn.Module, name: str, usual: Any = None) -> Any:
    """An attribute as it was before the additions to a layer changed it."""
    for additions in layer.children():
        if isinstance(additions, Additions):
            for changed, attribute, value in additions.changed:
                if changed is owner and attribute == name:
                    return value
    return getattr(owner, name, usual)
