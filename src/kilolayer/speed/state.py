"""The residual stream between sublayers as kernels write it."""

from __future__ import annotations

from typing import NamedTuple, Self

from torch import Tensor


class State(NamedTuple):
    """One state [batch, length, dim], for its two readers: the next residual, and the products of the next function.

    rounded: the same in the dtype of the products, where a kernel has written both at once; otherwise `precise` itself, which a
    projection rounds when it reads it.
    normed: the norm of the state in the dtype of the products, where the next sublayer begins with a norm and a kernel has
    written both at once; otherwise None, and the sublayer normalises `precise`.
    """

    precise: Tensor
    rounded: Tensor
    normed: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor, normed: Tensor | None = None) -> Self:
        """A state that nothing has rounded yet."""
        return cls(x, x, normed)
