"""Tensors under two names: a table of entries, read from left to right for export and from right to left for import."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kilolayer.errors import InputError


@dataclass(frozen=True)
class Entry:
    """One Kilolayer tensor, and its counterpart in Transformers.

    theirs: the name; for a matrix that Kilolayer stores fused, the names of its parts, stacked by rows.
    rows: the rows of these parts, if they differ.
    transposed: theirs is [inputs, outputs] and ours [outputs, inputs].
    rows_before: extra rows at the beginning of their table.
    as_row: theirs is [1, n] and ours [n].
    our_shape, their_shape: of both, if theirs has other axes.
    absent: the index of a part of our fused tensor that theirs does not have, and that is 0.
    """

    ours: str
    theirs: tuple[str, ...]
    transposed: bool = False
    rows_before: int = 0
    as_row: bool = False
    rows: tuple[int, ...] = ()
    our_shape: tuple[int, ...] = ()
    their_shape: tuple[int, ...] = ()
    absent: int | None = None

    def to_theirs(self, tensor: Tensor) -> dict[str, Tensor]:
        """Convert our tensor to theirs."""
        count = len(self.theirs) + (self.absent is not None)
        parts = list(tensor.split(self.rows) if self.rows else tensor.chunk(count))
        if self.absent is not None:
            del parts[self.absent]
        return {name: self._part_to_theirs(part) for name, part in zip(self.theirs, parts, strict=True)}

    def to_ours(self, tensors: Sequence[Tensor]) -> Tensor:
        """Convert their tensors, in the order of `theirs`, to ours."""
        if self.as_row:
            tensors = [tensor.reshape(-1) for tensor in tensors]
        parts = [tensor.t() if self.transposed else tensor for tensor in tensors]
        if self.rows_before:
            parts = [part[self.rows_before :] for part in parts]
        if self.our_shape:
            parts = [part.reshape(self.our_shape) for part in parts]
        if self.absent is not None:
            parts.insert(self.absent, torch.zeros_like(parts[0]))
        return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()

    def _part_to_theirs(self, part: Tensor) -> Tensor:
        if self.as_row:
            part = part[None]
        if self.their_shape:
            part = part.reshape(self.their_shape)
        if self.rows_before:
            part = torch.cat([part.new_zeros(self.rows_before, *part.shape[1:]), part])
        return (part.t() if self.transposed else part).contiguous()


def linear(ours: str, *theirs: str, transposed: bool = False) -> list[Entry]:
    """Weight and bias of a projection; several names are the parts of a fused one, such as query, key and value."""
    return [
        Entry(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), transposed=transposed),
        Entry(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs)),
    ]


def norm(ours: str, theirs: str) -> list[Entry]:
    """Gain and bias of a LayerNorm."""
    return [Entry(f"{ours}.{part}", (f"{theirs}.{part}",)) for part in ("weight", "bias")]


def to_theirs(entries: Iterable[Entry], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict under their names; every tensor must have an entry."""
    table = {entry.ours: entry for entry in entries}
    if missing := set(ours) ^ set(table):
        raise InputError(f"the table of weights does not fit the model: {min(missing)}")
    return {name: tensor for entry in table.values() for name, tensor in entry.to_theirs(ours[entry.ours]).items()}


def under_own_name(entries: Iterable[Entry], theirs: Mapping[str, Tensor], *, copies: Mapping[str, str]) -> dict[str, Tensor]:
    """Their tensors, each under its own name; raises if one is missing or unknown.

    copies: names under which a file may repeat the tensor of another name, or be the only one to store it.
    """
    found = {name: tensor for name, tensor in theirs.items() if name not in copies}
    for copy, name in copies.items():
        if copy in theirs:
            found.setdefault(name, theirs[copy])
    wanted = {name for entry in entries for name in entry.theirs}
    if differing := wanted ^ set(found):
        name = min(differing)
        what = "is missing" if name in wanted else "has no place in a model of ours"
        raise InputError(f"the tensor {name} {what}", fix="the folder's config.json and its weights do not belong together")
    return found


def check_tensors(theirs: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raise unless each tensor has the shape of the wanted one, and floating-point numbers."""
    for name, tensor in wanted.items():
        found = theirs[name]
        if found.shape != tensor.shape:
            raise InputError(
                f"the tensor {name} has the shape {list(found.shape)}, and by config.json {list(tensor.shape)}",
                fix="the two files do not belong together: download both again",
            )
        if not found.is_floating_point():
            raise InputError(
                f"the tensor {name} is of {str(found.dtype).removeprefix('torch.')}, not of floating-point numbers",
                fix="convert the weights to float32, and save them again",
            )


def to_ours(entries: Iterable[Entry], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their state dict, which `check_tensors` has checked, under our names."""
    return {entry.ours: entry.to_ours([theirs[name] for name in entry.theirs]) for entry in entries}
