"""Check that a set of weights fits a model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def find_misfit(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> str | None:
    """Describe the first difference between two sets of weights in names, shapes or non-float dtypes; None if there is none."""
    here, there = ({name: _described(tensor) for name, tensor in tensors.items()} for tensors in (ours, theirs))
    for name in {**here, **there}:
        if here.get(name) != there.get(name):
            return f"{name} is {there.get(name, 'missing')} there and {here.get(name, 'missing')} here"
    return None


def _described(tensor: Tensor) -> str:
    return str(tuple(tensor.shape)) + ("" if tensor.is_floating_point() else f" of {tensor.dtype}")
