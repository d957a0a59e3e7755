"""Whether weights are those of a model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def find_misfit(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> str | None:
    """What tells two sets of weights apart, by names, shapes and kinds; None where nothing does."""
    here, there = ({name: _described(tensor) for name, tensor in tensors.items()} for tensors in (ours, theirs))
    for name in {**here, **there}:
        if here.get(name) != there.get(name):
            return f"{name} is {there.get(name, 'missing')} there and {here.get(name, 'missing')} here"
    return None


def _described(tensor: Tensor) -> str:
    return str(tuple(tensor.shape)) + ("" if tensor.is_floating_point() else f" of {tensor.dtype}")
