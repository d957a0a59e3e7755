"""The keywords that the constructors of all models share, for type checkers; `ModelConfig` explains and checks them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import ParamSpec, TypedDict

import torch

from kilolayer.config import strict
from kilolayer.layers.options import Activation, Positions
from kilolayer.models.config import ModelConfig
from kilolayer.moe.config import MoE

Parameters = ParamSpec("Parameters")


class ModelOptions(TypedDict, total=False):
    """Options of `ModelConfig` that models of all shapes have, and where the weights are made."""

    kv_heads: int | None
    activation: Activation
    norm: str
    norm_eps: float
    qk_norm: bool
    positions: Positions
    max_length: int | None
    dropout: float
    attention_dropout: float
    activation_dropout: float
    drop_path: float
    pad_id: int | None
    scale_embeddings: bool
    embedding_norm: bool
    output_bias: bool
    final_norm: bool | None
    moe: MoE | None
    device: torch.device | str | None
    dtype: torch.dtype | None


def takes_options(init: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Make a constructor with `**options: Unpack[ModelOptions]` strict, and show them with their defaults in its signature."""
    defaults = {field.name: field.default for field in dataclasses.fields(ModelConfig)} | {"device": None, "dtype": None}
    shared = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation.__forward_arg__)
        for name, annotation in ModelOptions.__annotations__.items()
    ]
    signature = inspect.signature(init)
    own = [each for each in signature.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    vars(init)["__signature__"] = signature.replace(parameters=[*own, *shared])
    return strict(init)
