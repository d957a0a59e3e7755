"""Check that a set of weights fits a model, and before the model is built, that it can."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kilolayer.files.tensors import Expected
from kilolayer.models.build import build_model
from kilolayer.models.config import ModelConfig
from kilolayer.models.trainable_config import TrainableConfig

LEAST_PER_LAYER, MOST_PER_LAYER, BESIDE_LAYERS = 4, 100, 1000
"""Bounds on the tensors of a layer, which has two projections in each of its sublayers, and on those outside of layers."""
MOST_PER_PARAMETER, BESIDE_PARAMETERS = 1000, 1 << 30
"""Bounds on the bytes of a file: for each of about as many parameters as a model has, and for all that is not among these."""


def expected_weights(config: ModelConfig | TrainableConfig) -> Expected:
    """What a file with the weights of this model can hold; found without building it, which takes time by layer."""
    if isinstance(config, TrainableConfig):
        tensors = build_model(config, device="meta", seed=0).state_dict().values()
        size = sum(tensor.numel() for tensor in tensors)
        return Expected(range(len(tensors), len(tensors) + 1), MOST_PER_PARAMETER * size + BESIDE_PARAMETERS)
    layers = sum(config.depths.of(side) for side in config.depths.sides)
    number = range(LEAST_PER_LAYER * layers, MOST_PER_LAYER * layers + BESIDE_LAYERS)
    return Expected(number, MOST_PER_PARAMETER * config.about_parameters + BESIDE_PARAMETERS)


def find_misfit(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> str | None:
    """Describe the first difference between two sets of weights in names, shapes or non-float dtypes; None if there is none."""
    here, there = ({name: _described(tensor) for name, tensor in tensors.items()} for tensors in (ours, theirs))
    for name in {**here, **there}:
        if here.get(name) != there.get(name):
            return f"{name} is {there.get(name, 'missing')} there and {here.get(name, 'missing')} here"
    return None


def _described(tensor: Tensor) -> str:
    return str(tuple(tensor.shape)) + ("" if tensor.is_floating_point() else f" of {tensor.dtype}")
