"""Tensors under two names: a table of entries is read from left to right to export and from right to left to import."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kilolayer.errors import InputError


@dataclass(frozen=True)
class Entry:
    """One tensor of ours, and where theirs is.

    theirs: the name; of a matrix that we keep in one piece, the names of its equal parts, row by row.
    transposed: theirs is [inputs, outputs] where ours is [outputs, inputs].
    rows_before: rows that their table has before ours begins.
    as_row: theirs is [1, n] where ours is [n].
    """

    ours: str
    theirs: tuple[str, ...]
    transposed: bool = False
    rows_before: int = 0
    as_row: bool = False

    def to_theirs(self, tensor: Tensor) -> dict[str, Tensor]:
        """Our tensor as theirs."""
        parts = tensor.chunk(len(self.theirs))
        return {name: self._outwards(part) for name, part in zip(self.theirs, parts, strict=True)}

    def to_ours(self, tensors: Sequence[Tensor]) -> Tensor:
        """Their tensors, in the order of `theirs`, as ours."""
        if self.as_row:
            tensors = [tensor.reshape(-1) for tensor in tensors]
        parts = [(tensor.t() if self.transposed else tensor)[self.rows_before :] for tensor in tensors]
        return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()

    def _outwards(self, part: Tensor) -> Tensor:
        if self.as_row:
            part = part[None]
        if self.rows_before:
            part = torch.cat([part.new_zeros(self.rows_before, *part.shape[1:]), part])
        return (part.t() if self.transposed else part).contiguous()


def linear(ours: str, *theirs: str, transposed: bool = False) -> list[Entry]:
    """Weight and bias of a projection; several of theirs are the parts of ours, such as query, key and value."""
    return [
        Entry(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), transposed=transposed),
        Entry(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs)),
    ]


def norm(ours: str, theirs: str) -> list[Entry]:
    """Gain and bias of a LayerNorm."""
    return [Entry(f"{ours}.{part}", (f"{theirs}.{part}",)) for part in ("weight", "bias")]


def to_theirs(entries: Iterable[Entry], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of ours under their names; every tensor of it must have an entry."""
    table = {entry.ours: entry for entry in entries}
    if missing := set(ours) ^ set(table):
        raise InputError(f"the table of weights does not fit the model: {min(missing)}")
    return {name: tensor for entry in table.values() for name, tensor in entry.to_theirs(ours[entry.ours]).items()}


def to_ours(entries: Iterable[Entry], theirs: Mapping[str, Tensor], *, copies: Mapping[str, str]) -> dict[str, Tensor]:
    """A state dict of theirs under our names.

    copies: names under which a file may repeat the tensor of another name, or hold it alone.
    """
    found = {name: tensor for name, tensor in theirs.items() if name not in copies}
    for copy, name in copies.items():
        if copy in theirs:
            found.setdefault(name, theirs[copy])
    entries = list(entries)
    wanted = {name for entry in entries for name in entry.theirs}
    if differing := wanted ^ set(found):
        name = min(differing)
        what = "is missing" if name in wanted else "has no place in a model of ours"
        raise InputError(f"the tensor {name} {what}", fix="the folder's config.json and its weights do not belong together")
    return {entry.ours: entry.to_ours([found[name] for name in entry.theirs]) for entry in entries}
