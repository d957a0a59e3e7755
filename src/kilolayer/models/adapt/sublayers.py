"""The parts of another library's layer in terms of a recipe: sublayers, and projections by role."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from kilolayer.recipes.base import Kind
from kilolayer.recipes.role import Role

READING = (Role.QUERY_KEY, Role.VALUE, Role.FFN_IN)


@dataclass(frozen=True)
class Matrix:
    """One projection, [outputs, inputs]: a weight, or one of the equal parts of a weight that holds several.

    transposed: whether the weight is stored as [inputs, outputs].
    start: a factor on its initial standard deviation, besides the recipe's gain.
    reads: whether its input is the sublayer's own; the keys and values of cross-attention read another stack.
    others: names of the owner's parameters that do not enter this product.
    """

    owner: nn.Module
    role: Role
    weight: str = "weight"
    bias: str = "bias"
    part: int = 0
    parts: int = 1
    transposed: bool = False
    start: float = 1.0
    reads: bool = True
    others: tuple[str, ...] = ()

    @property
    def values(self) -> Tensor:
        """A view of the weight, [outputs, inputs]."""
        weight = getattr(self.owner, self.weight)
        return (weight.t() if self.transposed else weight).chunk(self.parts)[self.part]

    @property
    def bias_values(self) -> Tensor | None:
        """A view of the bias, [outputs]; None if there is none."""
        bias = getattr(self.owner, self.bias, None)
        return None if bias is None else bias.chunk(self.parts)[self.part]

    @property
    def key(self) -> str:
        """Its name within its module."""
        return f"{self.weight}.{self.part}"


@dataclass(frozen=True)
class ForeignSublayer:
    """A residual sublayer of another library's layer.

    function: the first module of f; its first argument is the input of f.
    output: the last module of f, before dropout; it returns f(x), or a tuple that begins with it.
    norm: the layer's own, before f or after the sum.
    heads: of attention; 0 in a feed-forward network.
    """

    kind: Kind
    function: nn.Module
    output: nn.Module
    norm: nn.Module
    matrices: tuple[Matrix, ...]
    heads: int = 0

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.last.values.shape[0]

    @property
    def last(self) -> Matrix:
        """The last projection of f."""
        return next(matrix for matrix in self.matrices if matrix.role in (Role.ATTENTION_OUTPUT, Role.FFN_OUT))

    def readers(self) -> Iterator[Matrix]:
        """The projections that read the residual stream."""
        return (matrix for matrix in self.matrices if matrix.role in READING and matrix.reads)


def attention_matrices(
    query: nn.Module, key: nn.Module, value: nn.Module, output: nn.Module, *, cross: bool = False, query_start: float = 1.0
) -> tuple[Matrix, ...]:
    """The projections of an attention whose matrices are separate modules."""
    return (
        Matrix(query, Role.QUERY_KEY, start=query_start),
        Matrix(key, Role.QUERY_KEY, reads=not cross),
        Matrix(value, Role.VALUE, reads=not cross),
        Matrix(output, Role.ATTENTION_OUTPUT),
    )


def feedforward_matrices(*inputs: nn.Module, output: nn.Module, transposed: bool = False) -> tuple[Matrix, ...]:
    """The projections of a feed-forward network; a gated one has two input projections."""
    reading = (Matrix(each, Role.FFN_IN, transposed=transposed) for each in inputs)
    return (*reading, Matrix(output, Role.FFN_OUT, transposed=transposed))


def eps_name(norm: nn.Module) -> str:
    """The name of a norm's eps attribute."""
    return "eps" if hasattr(norm, "eps") else "variance_epsilon"
