"""What a norm is, and how the norm of a plan is built."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from kilolayer.errors import InputError
from kilolayer.layers.norms.registry import find_norm
from kilolayer.layers.options import LayerOptions
from kilolayer.recipes.base import NormSpec


class Norm(nn.Module):
    """A norm over the last axis: [..., size] to the same shape and dtype. It is built as `cls(size, eps=...)`.

    A norm of your own defines `__init__`, which sets `eps` and makes the parameters, `reset_parameters`, which fills them, and
    `forward`. If it is `weight * normalize(x) + bias`, `normalize` lets each expert of a layer have its own.
    title: its name in messages. has_bias: whether it has a bias. is_homogeneous: whether it is `weight * normalize(x) + bias`
    and normalize(c x) with eps is normalize(x) with eps / c^2, by which scales can be moved through it.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    has_bias: ClassVar[bool] = False
    is_homogeneous: ClassVar[bool] = False
    eps: float

    def reset_parameters(self) -> None:
        """Fill the parameters with their initial values."""
        raise NotImplementedError

    @staticmethod
    def normalize(x: Tensor, eps: float) -> Tensor:
        """The norm without weight and bias: [..., size] to the same shape."""
        raise NotImplementedError

    @classmethod
    def words(cls) -> str:
        """What errors call the norms of this class."""
        return f"{cls.title or cls.__name__}s"


def norm_class(name: str) -> type[Norm]:
    """The class of a norm, by its name or as `my_module:MyNorm`."""
    norm = find_norm(name)
    if not (isinstance(norm, type) and issubclass(norm, Norm)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            f"{name} is not a norm", where="norm", fix="name a class that extends kilolayer.layers.norms.base.Norm"
        )
    return norm


def make_norm(spec: NormSpec | None, size: int, options: LayerOptions) -> nn.Module:
    """The norm that a plan asks for, over a last axis of `size` elements; the identity if it asks for none."""
    if spec is None:
        return nn.Identity()
    kind = norm_class(options.norm if spec.kind is None else spec.kind)
    return kind(size, eps=options.norm_eps if spec.eps is None else spec.eps)
