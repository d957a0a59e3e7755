"""The residual stream between sublayers, in the form in which kernels write it."""

from __future__ import annotations

from typing import NamedTuple, Self

from torch import Tensor

from kilolayer.layers.stream import LayerState, Pair


class State(NamedTuple):
    """A state [batch, length, dim] in the forms that the next residual and the next function read.

    precise: the state in the dtype of the residual stream.
    rounded: the same in the dtype of the products, if a kernel has written both at once; otherwise `precise` itself, which
    projections round when they read it.
    normed: the norm of the state in the dtype of the products, if the next sublayer begins with a norm and a kernel has written
    both at once; otherwise None, and the sublayer normalizes `precise`.
    second: the second state, if the stream has one.
    """

    precise: Tensor
    rounded: Tensor
    normed: Tensor | None = None
    second: Tensor | None = None

    @classmethod
    def of(cls, x: LayerState, normed: Tensor | None = None) -> Self:
        """A state that has not been rounded yet."""
        return cls(x.x, x.x, normed, x.second) if isinstance(x, Pair) else cls(x, x, normed)

    @property
    def unwrapped(self) -> LayerState:
        """The state as plain layers take and return it."""
        return self.precise if self.second is None else Pair(self.precise, self.second)
