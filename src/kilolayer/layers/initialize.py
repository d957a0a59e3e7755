"""Weight initialization: one pass over the modules, with a separate random stream for each parameter.

The stream is keyed by the model's seed and the parameter's qualified name, so its values do not depend on the
order of construction, on the other parameters, or on whether the model was built on the meta device first.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor, nn

from kilolayer.errors import InputError
from kilolayer.layers.norms.base import Norm
from kilolayer.recipes.base import Plan
from kilolayer.recipes.init import Draw
from kilolayer.recipes.role import Role
from kilolayer.renamed import warn_renamed


class KeyedGenerator:
    """Random values for the parameters of one module, keyed by the model's seed and the module's qualified name.

    seed: by default drawn from torch's default generator.
    """

    def __init__(self, seed: int | None = None, module: str = "") -> None:
        self.seed, self.module = draw_seed() if seed is None else seed, module

    def normal_(self, tensor: Tensor, std: float, key: str = "weight") -> None:
        """Fill `tensor` with N(0, std^2)."""
        # Drawn in fp32 for every dtype, so that a bf16 model is the fp32 model rounded.
        values = torch.empty(tensor.shape, device=tensor.device, dtype=torch.float32).normal_(
            generator=self._generator(tensor, key)
        )
        tensor.copy_(values.mul_(std))

    def uniform_(self, tensor: Tensor, std: float, key: str = "weight") -> None:
        """Fill `tensor` uniformly over the symmetric interval whose standard deviation is `std`."""
        bound = 3**0.5 * std
        values = torch.empty(tensor.shape, device=tensor.device, dtype=torch.float32)
        values.uniform_(-1, 1, generator=self._generator(tensor, key))
        tensor.copy_(values.mul_(bound))

    def draw_(self, matrix: Tensor, plan: Plan, role: Role, key: str, factor: float = 1.0, fan_out: int | None = None) -> None:
        """Fill a matrix [rows, fan_in] as the plan says for its role, times `factor`.

        fan_out: by default `rows`; that of the whole matrix if this is a part of one that is initialized jointly.
        """
        rows, fan_in = matrix.shape
        draw = plan.init.draw(role)
        fill = self.normal_ if draw.shape == "normal" else self.uniform_
        fill(matrix, factor * plan.gain(role) * draw.std(fan_in, fan_out or rows), key)

    def bias_(self, bias: Tensor, plan: Plan, role: Role, fan_in: int, key: str = "bias") -> None:
        """Fill the bias [rows] of a matrix [rows, fan_in] as the plan says for its role."""
        if plan.init.draw(role).bias:
            self.uniform_(bias, plan.gain(role) * Draw("linear").std(fan_in, 1), key)
        else:
            bias.zero_()

    def _generator(self, tensor: Tensor, key: str) -> torch.Generator:
        digest = hashlib.blake2b(f"{self.seed}/{self.module}.{key}".encode(), digest_size=8).digest()
        return torch.Generator(tensor.device).manual_seed(int.from_bytes(digest) >> 1)


def reset(module: nn.Module, generator: KeyedGenerator) -> bool:
    """Initialize what `module` owns directly, not its children; returns False if the module does not say how.

    A module says so by `reset_parameters(generator=None)`. Norms start at constants and need no generator. The modules of torch
    have a `reset_parameters` without it, by which weights would depend on the order of construction.
    """
    if isinstance(module, Norm):
        module.reset_parameters()
    elif _takes_generator(type(module)):
        module.reset_parameters(generator)  # pyright: ignore[reportCallIssue]
    elif callable(fill := getattr(module, "fill", None)):
        warn_renamed(f"{type(module).__name__}.fill(noise)", "reset_parameters(generator)")
        fill(generator)
    else:
        return False
    return True


@cache
def _takes_generator(cls: type[nn.Module]) -> bool:
    method = getattr(cls, "reset_parameters", None)
    return method is not None and "generator" in inspect.signature(method).parameters


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Initialize every parameter and buffer of `model`, in place and on its device."""
    for name, module in model.named_modules():
        if not reset(module, KeyedGenerator(seed, name)):
            owned = [*module._parameters, *module._buffers]
            if owned:
                raise InputError(
                    f"a {type(module).__name__} has {', '.join(owned)}, and nothing says how they start",
                    where=name,
                    fix="put modules of your own into a model that has its weights, or give them reset_parameters(generator)",
                )


def draw_seed() -> int:
    """Draw a seed from torch's default generator: the only random number that building a model consumes."""
    return int(torch.randint(2**62, (), device="cpu"))


@contextmanager
def new_tensors(device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Iterator[None]:
    """A context in which new tensors are created on `device`, floating-point ones in `dtype`; None keeps torch's default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        with nullcontext() if device is None else torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
