"""The residual stream between sublayers as kernels write it."""

from __future__ import annotations

from typing import NamedTuple, Self

from torch import Tensor

from kilolayer.layers.stream import LayerState, Pair


class State(NamedTuple):
    """One state [batch, length, dim], for its two readers: the next residual, and the products of the next function.

    rounded: the same in the dtype of the products, where a kernel has written both at once; otherwise `precise` itself, which a
    projection rounds when it reads it.
    normed: the norm of the state in the dtype of the products, where the next sublayer begins with a norm and a kernel has
    written both at once; otherwise None, and the sublayer normalises `precise`.
    second: the second state, where the stream has one.
    """

    precise: Tensor
    rounded: Tensor
    normed: Tensor | None = None
    second: Tensor | None = None

    @classmethod
    def of(cls, x: LayerState, normed: Tensor | None = None) -> Self:
        """A state that nothing has rounded yet."""
        return cls(x.x, x.x, normed, x.second) if isinstance(x, Pair) else cls(x, x, normed)

    @property
    def given(self) -> LayerState:
        """As a plain layer takes and gives it."""
        return self.precise if self.second is None else Pair(self.precise, self.second)
