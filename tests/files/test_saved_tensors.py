"""Tensors whose rows are in several files: read as one, or refused by name before anything is read."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from kilolayer.errors import InputError
from kilolayer.files.saved_tensors import SavedTensors, outline_of, rows_from, rows_metadata
from kilolayer.files.tensors import Expected, serialize

WHOLE = {
    "table": torch.randn(10, 3, generator=torch.Generator().manual_seed(1)),
    "half": torch.arange(8.0).bfloat16(),
    "deep": torch.arange(5 * 2 * 2).view(5, 2, 2),
    "norm": torch.ones(4),
    "count": torch.tensor(7),
    "empty": torch.zeros(0, 3),
}
DIVIDED = {"table": (0, 4, 8, 10), "half": (0, 3, 6, 8), "deep": (0, 2, 4, 5)}
Rows = dict[str, Any]


def parts() -> list[tuple[dict[str, Tensor], Rows]]:
    """The tensors in three files, and what the metadata of each say."""
    made: list[tuple[dict[str, Tensor], Rows]] = []
    for index in range(3):
        ends = {name: (bounds[index], bounds[index + 1]) for name, bounds in DIVIDED.items()}
        held = {name: WHOLE[name][first:end] for name, (first, end) in ends.items()}
        if index == 0:
            held |= {name: tensor for name, tensor in WHOLE.items() if name not in DIVIDED}
        made.append((held, {name: [first, list(WHOLE[name].shape)] for name, (first, _) in ends.items()}))
    return made


def written(folder: Path, made: list[tuple[dict[str, Tensor], Rows]]) -> list[Path]:
    paths = [folder / f"model-{index}.safetensors" for index in range(len(made))]
    for path, (tensors, rows) in zip(paths, made, strict=True):
        path.write_bytes(b"".join(serialize(tensors, rows_metadata(rows))))
    return paths


def test_tensors_in_several_files_are_read_as_one(tmp_path: Path) -> None:
    found = SavedTensors(written(tmp_path, parts()))
    assert set(found) == set(WHOLE)
    for name, tensor in WHOLE.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
        assert outline_of(found)[name].shape == tensor.shape
    for name, bounds in DIVIDED.items():
        for first in range(bounds[-1]):
            for stop in range(first, bounds[-1] + 1):
                assert torch.equal(rows_from(found, name, range(first, stop)), WHOLE[name][first:stop]), (name, first, stop)


def test_the_files_are_readable_by_others_and_rows_of_whole_files_are_too(tmp_path: Path) -> None:
    paths = written(tmp_path, [*parts(), (WHOLE, {})])
    theirs = safetensors.torch.load_file(paths[1])
    assert torch.equal(theirs["table"], WHOLE["table"][4:8])
    assert torch.equal(rows_from(SavedTensors(paths[3:]), "table", range(3, 5)), WHOLE["table"][3:5])


def change(
    index: int, name: str, tensor: Tensor | None, row: Any = None
) -> Callable[[list[tuple[dict[str, Tensor], Rows]]], Any]:
    """Replace, or with None remove, a tensor of a file, and what its metadata say."""

    def changed(made: list[tuple[dict[str, Tensor], Rows]]) -> None:
        made[index][0].pop(name)
        old = made[index][1].pop(name, None)
        if tensor is not None:
            made[index][0][name] = tensor
            if row is not None or old is not None:
                made[index][1][name] = old if row is None else row

    return changed


FAULTS = {
    "missing between": (change(1, "table", None), "model-2", "rows 4 to 7 of table are missing before those here"),
    "missing behind": (change(2, "table", None), "model-1", "rows 8 to 9 of table are missing behind those here"),
    "overlapping": (
        change(1, "table", torch.ones(5, 3), [3, [10, 3]]),
        "model-1",
        "row 3 of table is here and in another file",
    ),
    "twice": (change(1, "table", torch.ones(4, 3), [0, [10, 3]]), "model-1", "row 0 of table is here and in another file"),
    "whole beside rows": (change(1, "table", torch.ones(10, 3), [0, [10, 3]]), "model-1", "row 0 of table"),
    "another width": (change(1, "table", torch.ones(4, 2)), "model-1", r"say of table, of which it holds .* \[4, 2\]"),
    "another whole": (
        change(1, "table", torch.ones(4, 3), [4, [11, 3]]),
        "model-1",
        r"table is float32 \[11, 3\] here and float32 \[10, 3\] in",
    ),
    "another dtype": (change(1, "table", torch.ones(4, 3).half()), "model-1", "table is float16 .* here and float32"),
    "beyond the end": (change(2, "table", torch.ones(2, 3), [9, [10, 3]]), "model-2", "its metadata say of table"),
    "negative": (change(0, "table", torch.ones(4, 3), [-4, [10, 3]]), "model-0", "its metadata say of table"),
    "no numbers": (change(0, "table", torch.ones(4, 3), ["0", [10, 3]]), "model-0", "its metadata say of table"),
    "fractions": (change(0, "table", torch.ones(4, 3), [0, [10.0, 3]]), "model-0", "its metadata say of table"),
    "a table": (change(0, "table", torch.ones(4, 3), {"first": 0}), "model-0", "its metadata say of table"),
    "huge": (change(0, "table", torch.ones(4, 3), [0, [10**15, 3]]), "model-1", "table is float32"),
    "another rank": (change(0, "table", torch.ones(4, 3), [0, [10]]), "model-0", "its metadata say of table"),
    "a name that is not there": (lambda made: made[0][1].update(other=[0, [1]]), "model-0", "rows of other tensors"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_together_is_named(tmp_path: Path, fault: str) -> None:
    made, (spoil, file, text) = parts(), FAULTS[fault]
    spoil(made)
    paths = written(tmp_path, made)
    before = time.monotonic()
    with pytest.raises(InputError, match=text) as caught:
        SavedTensors(paths)
    assert file in caught.value.where
    assert time.monotonic() - before < 1


@pytest.mark.parametrize("text", ["[]", "3", "{", "[" * 100_000, '{"table": null}'])
def test_metadata_of_another_form_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"".join(serialize({"table": WHOLE["table"]}, {"rows": text})))
    with pytest.raises(InputError) as caught:
        SavedTensors([path])
    assert caught.value.where == str(path)


def test_a_dtype_that_is_not_supported_is_named(tmp_path: Path) -> None:
    safetensors.torch.save_file({"norm": torch.ones(4).to(torch.float8_e5m2)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="the tensor norm is of F8_E5M2, which is not supported") as caught:
        SavedTensors([tmp_path / "model.safetensors"])
    assert caught.value.where == str(tmp_path / "model.safetensors")


def test_more_than_can_be_expected_is_refused(tmp_path: Path) -> None:
    paths = written(tmp_path, parts())
    with pytest.raises(InputError, match="6 tensors"):
        SavedTensors(paths, expected=Expected(range(7, 20)))
    with pytest.raises(InputError, match=r"more than the 1\.0 KiB that can be expected"):
        SavedTensors(paths, expected=Expected(range(20), 1024))
