"""Tensors in safetensors files, each read when it is asked for: of one file, or of several that hold some rows of each.

A file that does not hold all rows of a tensor says so in its metadata: `rows` is JSON, {"NAME": [first row, [whole shape]]}.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import safetensors
import torch
from torch import Tensor

from kilolayer.errors import InputError
from kilolayer.files.reading import open_regular, parse_json
from kilolayer.files.tensors import DTYPES, Expected, parsing, read_header
from kilolayer.terminal import human_bytes

OF_NAMES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class _Part:
    """What one file holds of a tensor: these of its rows. shape: of the whole tensor; a number is one row."""

    path: Path
    file: Any
    rows: range
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def kind(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of these files by name. Before any is read, the headers must describe each of them once and wholly."""

    def __init__(
        self, paths: Sequence[Path], *, expected: Expected | None = None, fix: str = "use a checkpoint of a run"
    ) -> None:
        """expected: what the files can hold together. fix: for errors."""
        expected = expected or Expected()
        fewest = expected.number.start if len(paths) == 1 else 0
        self.where, self.fix = paths[0] if len(paths) == 1 else paths[0].parent, fix
        self.parts: dict[str, list[_Part]] = {}
        size = 0
        for path in paths:
            size += path.stat().st_size
            for name, part in _parts_in(path, Expected(range(fewest, expected.number.stop), expected.size), fix):
                self.parts.setdefault(name, []).append(part)
        if size > expected.size:
            raise self._fault(
                f"the files hold {human_bytes(size)}, more than the {human_bytes(expected.size)} that can be expected here"
            )
        if len(self.parts) not in expected.number:
            raise self._fault(f"the files hold {len(self.parts):,} tensors, which is not what can be expected here")
        for name, parts in self.parts.items():
            parts.sort(key=lambda part: (part.rows.start, part.rows.stop))
            self._check(name, parts)

    def _check(self, name: str, parts: list[_Part]) -> None:
        """Raise unless the parts of a tensor follow each other from its first to its last row."""
        end, count = 0, parts[0].shape[0] if parts[0].shape else 1
        for part in parts:
            if part.kind != parts[0].kind:
                raise self._fault(f"{name} is {part.kind} here and {parts[0].kind} in {parts[0].path.name}", part)
            if part.rows.start < end:
                raise self._fault(f"row {part.rows.start:,} of {name} is here and in another file", part)
            if part.rows.start > end:
                raise self._fault(f"rows {end:,} to {part.rows.start - 1:,} of {name} are missing before those here", part)
            end = part.rows.stop
        if end != count:
            raise self._fault(f"rows {end:,} to {count - 1:,} of {name} are missing behind those here", parts[-1])

    def _fault(self, what: str, part: _Part | None = None) -> InputError:
        return InputError(what, where=str(self.where if part is None else part.path), fix=self.fix)

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __contains__(self, name: object) -> bool:
        return name in self.parts

    def __getitem__(self, name: str) -> Tensor:
        first = self.parts[name][0]
        if len(self.parts[name]) > 1:
            return self.rows(name, range(first.shape[0]))
        with parsing(first.path, self.fix):
            return first.file.get_tensor(name)

    def rows(self, name: str, wanted: range) -> Tensor:
        """Some rows of a tensor; nothing else of it is read."""
        parts = [part for part in self.parts[name] if part.rows.start < wanted.stop and wanted.start < part.rows.stop]
        read: list[Tensor] = []
        for part in parts:
            start, stop = max(part.rows.start, wanted.start), min(part.rows.stop, wanted.stop)
            with parsing(part.path, self.fix):
                read.append(part.file.get_slice(name)[start - part.rows.start : stop - part.rows.start])
        if len(read) == 1:
            return read[0]
        first = self.parts[name][0]
        return torch.cat(read) if read else torch.empty(0, *first.shape[1:], dtype=first.dtype)

    def outline(self) -> dict[str, Tensor]:
        """The whole tensors on the meta device."""
        return {name: torch.empty(parts[0].shape, dtype=parts[0].dtype, device="meta") for name, parts in self.parts.items()}


class SelectedTensors(Mapping[str, Tensor]):
    """Some tensors of `SavedTensors` under other names, and others that are held beside them.

    saved: the name in `source` of each that is read when it is asked for.
    """

    def __init__(self, source: SavedTensors, saved: Mapping[str, str], held: Mapping[str, Tensor]) -> None:
        self.source, self.saved, self.held = source, saved, held

    @classmethod
    def converted(
        cls, source: SavedTensors, convert: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]], read: Collection[str]
    ) -> Self | None:
        """What `convert` makes of all tensors, if it chooses them by name and shape: none is read for it but those of `read`.

        None if it computes with the values of others.
        """
        given = {name: source[name] if name in read else tensor for name, tensor in source.outline().items()}
        names = {id(tensor): name for name, tensor in given.items() if tensor.is_meta}
        try:
            found = convert(given)
        except (NotImplementedError, RuntimeError) as error:  # torch's, for a tensor without values
            logging.getLogger(__name__).debug("all tensors of %s are read whole: %s", source, error)
            return None
        held = {name: tensor for name, tensor in found.items() if id(tensor) not in names}
        if any(tensor.is_meta for tensor in held.values()):
            return None
        return cls(source, {name: names[id(found[name])] for name in found if name not in held}, held)

    def __len__(self) -> int:
        return len(self.saved) + len(self.held)

    def __iter__(self) -> Iterator[str]:
        yield from self.saved
        yield from self.held

    def __getitem__(self, name: str) -> Tensor:
        return self.held[name] if name in self.held else self.source[self.saved[name]]

    def rows(self, name: str, wanted: range) -> Tensor:
        """Some rows of a tensor; nothing else of it is read."""
        if name in self.held:
            return self.held[name][wanted.start : wanted.stop]
        return self.source.rows(self.saved[name], wanted)

    def outline(self) -> dict[str, Tensor]:
        """The tensors, those that are not held on the meta device."""
        whole = self.source.outline()
        return {**self.held, **{name: whole[theirs] for name, theirs in self.saved.items()}}


def outline_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tensors of the same shapes and dtypes; nothing is read for them."""
    return tensors.outline() if isinstance(tensors, SavedTensors | SelectedTensors) else tensors


def rows_from(tensors: Mapping[str, Tensor], name: str, rows: range | None) -> Tensor:
    """Some rows of a tensor, or with None all of it."""
    if rows is None:
        return tensors[name]
    return (
        tensors.rows(name, rows)
        if isinstance(tensors, SavedTensors | SelectedTensors)
        else tensors[name][rows.start : rows.stop]
    )


def rows_metadata(rows: Mapping[str, tuple[int, Sequence[int]]]) -> dict[str, str]:
    """The metadata of a file that holds some rows of these tensors: of each, the first row and the whole shape."""
    return {"rows": json.dumps(rows, separators=(",", ":"))} if rows else {}


def _parts_in(path: Path, expected: Expected, fix: str) -> Iterator[tuple[str, _Part]]:
    """The tensors of a file, by name."""
    with parsing(path, fix), open_regular(path) as opened:
        read_header(opened, expected)
        file = safetensors.safe_open(path, framework="pt")
        rows = parse_json((file.metadata() or {}).get("rows", "{}"))
        names = list(file.keys())
        if not isinstance(rows, dict) or not rows.keys() <= set(names):
            raise InputError("its metadata describe rows of other tensors than it holds")
        for name in names:
            header = file.get_slice(name)
            held, dtype = tuple(header.get_shape()), header.get_dtype()
            if dtype not in OF_NAMES:
                raise InputError(f"the tensor {name} is of {dtype}, which is not supported")
            first, shape = _place(name, held, rows.get(name, [0, list(held)]))
            yield name, _Part(path, file, range(first, first + (held[0] if held else 1)), shape, OF_NAMES[dtype])


def _place(name: str, held: tuple[int, ...], given: Any) -> tuple[int, tuple[int, ...]]:
    """The first row that a file holds of a tensor and the whole shape; held: the shape of these rows, given: as in metadata."""
    match given:
        case [int(first), [*shape]] if all(type(each) is int for each in shape):
            fits = first >= 0 and len(shape) == len(held) and shape[1:] == list(held[1:])
            if fits and (not held or first + held[0] <= shape[0]):
                return first, tuple(shape)
        case _:
            pass
    raise InputError(f"its metadata say of {name}, of which it holds rows of the shape {list(held)}, {str(given)[:100]}")
