"""Checkpoints that several processes write together: whole, or as if they were not there."""

from __future__ import annotations

import json
import logging
import random
import shutil
from pathlib import Path

import pytest
import torch

from kilolayer.errors import InputError
from kilolayer.files.tensors import load_tensors
from kilolayer.runs import checkpoint
from kilolayer.runs.checkpoint import CheckpointError
from tests.fixtures.process_pool import ProcessPool
from tests.runs import shared_checkpoints
from tests.runs.shared_checkpoints import same, whole


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, pool: ProcessPool) -> Path:
    """Two checkpoints of four processes, not to be changed."""
    folder = tmp_path_factory.mktemp("parts") / "checkpoints"
    pool.run(shared_checkpoints.save, 4, folder, [10, 20], 9)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "checkpoints")


NAMES = [f"{kind}-0000{number}-of-00004.safetensors" for kind in ("model", "optimizer") for number in (1, 2, 3, 4)]


def test_each_process_writes_its_rows_and_the_whole_is_read(saved: Path) -> None:
    path = saved / "step-00000020"
    assert sorted(each.name for each in path.iterdir()) == sorted([*NAMES, "state.json", "manifest.json"])
    assert checkpoint.find_fault(path) is None
    assert same(checkpoint.load(path), whole(20))
    assert same(checkpoint.load(path, by_rows=True), whole(20))
    second = load_tensors(path / NAMES[1])
    assert {name: list(tensor.shape) for name, tensor in second.items()} == {"weight": [2, 5], "bias": [1]}
    assert not load_tensors(path / NAMES[3]).keys() & {"bias", "norm", "scale"}
    mean = checkpoint.average([saved / "step-00000010", path])
    torch.testing.assert_close(mean["weight"], (whole(10).model["weight"] + whole(20).model["weight"]) / 2)
    assert json.loads((saved.parent / "last_checkpoint.json").read_text()) == {"step": 20}


def test_only_the_newest_are_kept_and_another_number_of_processes_replaces_them(folder: Path, pool: ProcessPool) -> None:
    (folder / "step-00000020" / NAMES[2]).unlink()
    pool.run(shared_checkpoints.save, 2, folder, [20, 30], 2)
    assert [checkpoint.step_of(path) for path in checkpoint.steps(folder)] == [20, 30]
    for path in checkpoint.steps(folder):
        assert same(checkpoint.load(path), whole(checkpoint.step_of(path)))
        assert len(list(path.iterdir())) == 6
    checkpoint.save(folder, whole(30))
    assert same(checkpoint.load(folder / "step-00000030"), whole(30))


@pytest.mark.parametrize("damage", ["removed", "cut", "flipped", "swapped"])
@pytest.mark.parametrize("name", [NAMES[0], NAMES[2], NAMES[7]])
def test_a_damaged_part_is_named_and_the_checkpoint_before_it_is_used(
    folder: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    path = folder / "step-00000020" / name
    data = bytearray(path.read_bytes())
    if damage == "removed":
        path.unlink()
    elif damage == "swapped":
        shutil.copy(path.with_name(name.replace(name[-24:], NAMES[1][-24:])), path)
    else:
        data[-1] ^= 1
        path.write_bytes(data if damage == "flipped" else data[:-1])
    with caplog.at_level(logging.WARNING):
        assert checkpoint.newest(folder) == folder / "step-00000010"
    assert len(caplog.messages) == 1
    assert name in caplog.messages[0]
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(folder / "step-00000020")


def forge(path: Path, change: dict[str, Path | None]) -> None:
    """Replace files of a checkpoint, or with None remove them, and describe it by a manifest that matches."""
    manifest = json.loads((path / "manifest.json").read_text())
    for name, source in change.items():
        (path / name).unlink(missing_ok=True)
        manifest["files"].pop(name, None)
        if source is not None:
            shutil.copy(source, path / name)
            manifest["files"][name] = checkpoint.fingerprint(path / name)
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_parts_of_another_checkpoint_are_refused_by_file_and_tensor(folder: Path, pool: ProcessPool, tmp_path: Path) -> None:
    pool.run(shared_checkpoints.save, 2, tmp_path / "two", [20], 9)
    path, two = folder / "step-00000020", tmp_path / "two" / "step-00000020"
    forge(path, {NAMES[0]: two / "model-00001-of-00002.safetensors"})  # the first rows are four, not two
    assert checkpoint.find_fault(path) is None
    for by_rows in (False, True):
        with pytest.raises(InputError, match=r"row \d of (bias|weight) is here and in another file") as caught:
            checkpoint.load(path, by_rows=by_rows)
        assert NAMES[1] in caught.value.where
    forge(path, {NAMES[0]: path / NAMES[3]})
    with pytest.raises(InputError, match="of weight"):
        checkpoint.load(path)


@pytest.mark.parametrize("files", [["state.json"], NAMES, [NAMES[0], NAMES[4], "state.json"], [*NAMES[:7], "state.json"], []])
def test_a_manifest_that_leaves_out_files_is_a_fault(folder: Path, files: list[str]) -> None:
    path = folder / "step-00000020"
    forge(path, {name: None for name in [*NAMES, "state.json"] if name not in files})
    assert checkpoint.find_fault(path) == "manifest.json does not describe it"


@pytest.mark.parametrize("name", [NAMES[1], NAMES[6], "state.json", "manifest.json"])
def test_a_full_disk_of_one_process_reaches_all_and_leaves_no_part(folder: Path, pool: ProcessPool, name: str) -> None:
    pool.run(shared_checkpoints.fill_the_disk, 4, folder, 30, name)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000010", "step-00000020"]
    assert all(checkpoint.find_fault(path) is None for path in checkpoint.steps(folder))
    if name == NAMES[1]:
        pool.run(shared_checkpoints.save, 4, folder, [30], 9)
        assert same(checkpoint.load(folder / "step-00000030"), whole(30))


def test_an_error_after_writing_reaches_all(tmp_path: Path, pool: ProcessPool) -> None:
    pool.run(shared_checkpoints.fail_after_writing, 2, tmp_path / "checkpoints")


@pytest.mark.slow
@pytest.mark.parametrize(("bytes_at_once", "hangs"), [(40, False), (2**20, True)])
def test_a_slow_disk_is_not_a_hang(tmp_path: Path, pool: ProcessPool, bytes_at_once: int, hangs: bool) -> None:
    pool.run(shared_checkpoints.write_slowly, 2, tmp_path / "checkpoints", bytes_at_once, hangs)


def test_a_folder_that_cannot_be_made_reaches_all(tmp_path: Path, pool: ProcessPool) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(AssertionError, match=r"(?s)could not be written.*rank . of 2.*could not be written"):
        pool.run(shared_checkpoints.save, 2, tmp_path / "checkpoints", [1], 9)


def test_what_else_fails_on_one_process_reaches_all(tmp_path: Path, pool: ProcessPool) -> None:
    pool.run(shared_checkpoints.fail_in_code, 2, tmp_path / "checkpoints")
    assert not list((tmp_path / "checkpoints").iterdir())


def test_each_process_checks_some_of_the_files(folder: Path, pool: ProcessPool) -> None:
    path = folder / "step-00000020"
    data = bytearray((path / NAMES[5]).read_bytes())
    data[-1] ^= 1
    (path / NAMES[5]).write_bytes(data)
    pool.run(shared_checkpoints.read_a_share, 4, path, NAMES[5])


MOMENTS = [
    (1, "in model"),
    (0, "after optimizer"),
    (0, "in state"),
    (0, "in manifest"),
    (0, "before the rename"),
    (0, "after the rename"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "when"), MOMENTS)
def test_a_kill_leaves_the_old_or_the_new_checkpoint(folder: Path, pool: ProcessPool, rank: int, when: str) -> None:
    with pytest.raises(AssertionError, match="a process is gone"):
        pool.run(shared_checkpoints.die, 2, folder, 30, rank, when)
    newest = checkpoint.newest(folder)
    assert newest == folder / ("step-00000030" if when == "after the rename" else "step-00000020")
    assert same(checkpoint.load(newest), whole(checkpoint.step_of(newest)))
    pool.run(shared_checkpoints.save, 2, folder, [30, 40], 1)
    assert [path.name for path in folder.iterdir()] == ["step-00000040"]
    assert same(checkpoint.load(folder / "step-00000040"), whole(40))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6))
def test_a_kill_at_any_moment_leaves_a_checkpoint(folder: Path, pool: ProcessPool, number: int) -> None:
    dice = random.Random(number)
    with pytest.raises(AssertionError, match="a process is gone"):
        pool.run(shared_checkpoints.die_at_random, 2, folder, range(30, 530), dice.randrange(2), dice.uniform(0.02, 0.5))
    newest = checkpoint.newest(folder)
    assert newest is not None
    assert same(checkpoint.load(newest), whole(checkpoint.step_of(newest)))
