"""The base of conversions to a Transformers class: which models fit it, its configuration, and its weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from kilolayer.errors import InputError, shown
from kilolayer.huggingface.weights import Entry
from kilolayer.layers.norms.base import norm_class
from kilolayer.models.config import ModelConfig
from kilolayer.recipes.base import Place, Plan

EPS = 1e-5
"""The eps of torch's LayerNorm, and so of every class without an option for it."""
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"}
"""Activation names: Kilolayer's to Transformers'."""
OTHER_NAMES = {"gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}
"""Further activation names of Transformers, to Kilolayer's."""


class ForeignClass(ABC):
    """One class of Transformers, as a table that is read in both directions."""

    model_type: ClassVar[str]
    """The name in config.json."""
    architecture: ClassVar[str]
    """The class with the output layer."""
    options: ClassVar[Mapping[str, tuple[str, ...]]]
    """Each Kilolayer option, and the Transformers options that hold its value; several hold the same."""

    defaults: ClassVar[Mapping[str, Any]] = {}
    """Transformers' default values, for options missing from config.json."""
    required: ClassVar[Mapping[str, Any]] = {}
    """Transformers options that must have a certain value to match a Kilolayer model."""
    readable: ClassVar[tuple[str, ...]] = ()
    """Architectures that can be imported; the last is the base model, without an output."""
    prefix: ClassVar[str] = "model."
    """Prefix of the names of all weights but the output's; files of the class without an output omit it."""
    outputs: ClassVar[tuple[str, ...]] = ("lm_head.",)
    """Prefixes of the names of an output's weights."""
    unread: ClassVar[str] = r"(?!)"
    """Regular expression for names of weights that a file may contain and that are ignored."""

    @abstractmethod
    def misfits(self, config: ModelConfig) -> Iterator[str]:
        """The reasons why a model does not fit this class; none if it does."""

    @abstractmethod
    def entries(self, config: ModelConfig) -> list[Entry]:
        """The weights of a model with this configuration, under both names."""

    @abstractmethod
    def copies(self, config: ModelConfig) -> dict[str, str]:
        """Transformers' names for tied tables, each with the name under which an exported file stores it."""

    def foreign_config(self, config: ModelConfig) -> dict[str, Any]:
        """The model's part of Transformers' config.json."""
        values = {name: value for ours, names in self.options.items() for name, value in self._to_theirs(config, ours, names)}
        return {"model_type": self.model_type, "architectures": [self.architecture], **values}

    def own_options(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        """The `ModelConfig` options that a config.json specifies; raises if an option has no counterpart."""
        found = {}
        for ours, names in self.options.items():
            values = [theirs[name] for name in names if name in theirs]
            if not values:
                continue
            if any(value != values[0] for value in values):
                raise InputError(
                    f"{' and '.join(names)} are {', '.join(map(shown, values))}",
                    where="config.json",
                    fix=f"Kilolayer has a single {ours}",
                )
            found[ours] = self._to_ours(ours, values[0])
        return found

    def options_of_weights(self, tensors: Mapping[str, Tensor], theirs: Mapping[str, Any]) -> dict[str, Any]:
        """The `ModelConfig` options that the weights determine, and config.json alone does not."""
        return {}

    def spare_entries(self, config: ModelConfig) -> list[Entry]:
        """Weights that a file may contain and the model does not have, such as the first matrix of a head added later."""
        return []

    def _to_theirs(self, config: ModelConfig, ours: str, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        value = getattr(config, ours)
        for name in names:
            yield name, ACTIVATIONS[value] if ours == "activation" else value

    def _to_ours(self, ours: str, value: Any) -> Any:
        if ours != "activation":
            return value
        known = {theirs: mine for mine, theirs in ACTIVATIONS.items()} | OTHER_NAMES
        if not isinstance(value, str) or value not in known:
            raise InputError(
                f"the activation is {shown(value)}", where="config.json", fix=f"supported: {', '.join(sorted(known))}"
            )
        return known[value]


def plans_of(config: ModelConfig) -> Iterator[Plan]:
    """The plan of every sublayer, without the initialization of its projections."""
    depths = config.depths
    for side in depths.sides:
        for layer in range(1, depths.of(side) + 1):
            for kind in depths.kinds(side):
                yield replace(config.recipe.plan(Place(kind, side, layer, depths)), gains={})


def is_plain(config: ModelConfig, plan: Plan) -> bool:
    """Whether every sublayer has this plan, and the stacks have nothing else that a plain stack lacks."""
    recipe, depths = config.recipe, config.depths
    tops = [recipe.top(side, depths) for side in depths.sides]
    return (
        all(each == plan for each in plans_of(config))
        and recipe.stream() is None
        and not any(recipe.input_norm(side, depths) for side in depths.sides)
        and all(top.norm == plan.pre_norm and not top.shift and not top.scale for top in tops)
        and recipe.output_factor(config.dim) == 1.0
    )


def shared_misfits(config: ModelConfig) -> Iterator[str]:
    """The reasons why a model fits none of the plain classes."""
    if config.embedding_norm:
        yield "it has a norm on its embeddings"
    if config.first_predicted:
        yield f"its first {config.first_predicted} tokens have no probability"
    if config.norm == "layer" and config.norm_eps != EPS:
        yield f"its norm_eps is {config.norm_eps:g}, and theirs is fixed at {EPS:g}"
    yield from layer_misfits(config)


def layer_misfits(config: ModelConfig) -> Iterator[str]:
    """The reasons why layers fit none of the classes."""
    if config.moe is not None:
        yield "it has experts"
    if config.multiway is not None:
        yield "it has weights for each of two modalities (multiway)"
    if config.norm != "layer":
        yield f"its norms are {norm_class(config.norm).words()}"
    if config.qk_norm:
        yield "its queries and keys are normalized (qk_norm)"
    if config.kv_heads not in (None, config.heads):
        yield f"it has {config.kv_heads} heads of keys and values for {config.heads} of queries"
    if config.activation not in ACTIVATIONS:
        yield f"its activation is {config.activation}"
