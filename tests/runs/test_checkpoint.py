"""Checkpoints: whole, or as if they were not there."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import pickle
import random
import re
import shutil
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kilolayer.errors import InputError, UnreadableError
from kilolayer.files.tensors import load_tensors
from kilolayer.runs import checkpoint, hashed_file
from kilolayer.runs.checkpoint import Checkpoint, CheckpointError
from kilolayer.runs.retention import Inspector, prune
from kilolayer.runs.saver import Saver
from tests.runs.shared_checkpoints import same

EVERY_FILE = (*checkpoint.FILES, "manifest.json")


def made(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    model = {
        "weight": torch.randn(8, 8, generator=generator),
        "half": torch.randn(4, generator=generator).bfloat16(),
        "count": torch.tensor(step),
        "transposed": torch.randn(3, 5, generator=generator).t(),
        "empty": torch.zeros(0),
        "flag": torch.tensor([True, False]),
    }
    optimizer = {"weight/exp_avg": torch.randn(8, 8, generator=generator), "random.cpu": generator.get_state()}
    return Checkpoint(step, model, optimizer, {"guard": {"scale": 1.0}, "best": {"value": -0.1 - 0.2, "step": None}})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three whole checkpoints, not to be changed."""
    folder = tmp_path_factory.mktemp("saved")
    for step in (10, 20, 30):
        checkpoint.save(folder, made(step))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """Three whole checkpoints."""
    return shutil.copytree(saved, tmp_path, dirs_exist_ok=True)


def test_what_is_saved_is_loaded(folder: Path) -> None:
    assert same(checkpoint.load(folder / "step-00000020"), made(20))
    assert sorted(path.name for path in (folder / "step-00000020").iterdir()) == sorted(EVERY_FILE)
    manifest = json.loads((folder / "step-00000020" / "manifest.json").read_text())
    assert manifest["step"] == 20
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["files"]["state.json"]["bytes"] == (folder / "step-00000020" / "state.json").stat().st_size


def test_the_newest_is_found_and_other_folders_are_not_mistaken_for_one(folder: Path) -> None:
    shutil.copytree(folder / "step-00000030", folder / "step-00000040-copy")
    assert checkpoint.newest(folder) == folder / "step-00000030"
    assert [checkpoint.step_of(path) for path in checkpoint.steps(folder)] == [10, 20, 30]
    assert checkpoint.newest(folder / "absent") is None


def test_a_checkpoint_that_is_a_file_is_named_and_kept(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(folder / "step-00000030")
    (folder / "step-00000030").write_text("mine")
    assert_falls_back(folder, caplog, "damaged (it is not a folder)")
    caplog.clear()
    prune(folder, 1, set())
    assert caplog.messages == ["checkpoint of step 30 is damaged (it is not a folder): it is not counted and not deleted"]
    assert steps_in(folder) == [20, 30]
    assert same(checkpoint.load(checkpoint.save(folder, made(30))), made(30))


def assert_falls_back(folder: Path, caplog: pytest.LogCaptureFixture, *named: str) -> None:
    """The newest is passed over, in one line that names all this; the one before it serves."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        found = checkpoint.newest(folder)
    assert found is not None
    assert found == folder / "step-00000020"
    assert len(caplog.messages) == 1
    assert "\n" not in caplog.messages[0]
    for word in ("step 30", *named):
        assert word in caplog.messages[0]
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(folder / "step-00000030")
    assert same(checkpoint.load(found), made(20))


@pytest.mark.matrix(4)
@pytest.mark.parametrize("percent", [0, 1, 10, 50, 99])
@pytest.mark.parametrize("name", EVERY_FILE)
def test_a_truncated_file_is_found(folder: Path, caplog: pytest.LogCaptureFixture, name: str, percent: int) -> None:
    path = folder / "step-00000030" / name
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * percent // 100])
    assert_falls_back(folder, caplog, name, *(["SHA-256"] if name in checkpoint.FILES else []))


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", EVERY_FILE)
def test_a_file_that_is_missing_is_found(folder: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    (folder / "step-00000030" / name).unlink()
    assert_falls_back(folder, caplog, name)


def flip(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", checkpoint.FILES)
def test_every_flipped_bit_is_found(folder: Path, caplog: pytest.LogCaptureFixture, name: str, count: int) -> None:
    path = folder / "step-00000030" / name
    whole, dice = path.read_bytes(), random.Random(f"bits of {name}")
    for _ in range(count):
        flip(path, dice)
        assert checkpoint.find_fault(path.parent) is not None
        path.write_bytes(whole)
    assert checkpoint.find_fault(path.parent) is None
    flip(path, dice)
    assert_falls_back(folder, caplog, name, "SHA-256")


@pytest.mark.slow
@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_a_flipped_bit_of_the_manifest_is_found_or_does_no_harm(folder: Path, count: int) -> None:
    path = folder / "step-00000030" / "manifest.json"
    whole, dice, found = path.read_bytes(), random.Random(7), 0
    for _ in range(count):
        flip(path, dice)
        if checkpoint.find_fault(path.parent) is None:
            assert same(checkpoint.load(path.parent), made(30))  # it hit a version, say
        else:
            found += 1
        path.write_bytes(whole)
    assert found > 2 * count // 3


@pytest.mark.parametrize("text", ["", "[]", "null", '{"files": []}', '{"step": 30, "files": 3}', '{"step": 30}', "\0"])
def test_a_manifest_of_another_kind_is_a_fault_and_no_crash(folder: Path, text: str) -> None:
    (folder / "step-00000030" / "manifest.json").write_text(text)
    assert "manifest.json" in (checkpoint.find_fault(folder / "step-00000030") or "")


def test_a_manifest_from_another_step_is_a_fault(folder: Path) -> None:
    (folder / "step-00000030").rename(folder / "step-00000040")
    assert checkpoint.newest(folder) == folder / "step-00000020"


def test_all_damaged_is_none(folder: Path) -> None:
    for path in checkpoint.steps(folder):
        (path / "state.json").write_text("{}")
    assert checkpoint.newest(folder) is None


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", EVERY_FILE)
def test_a_full_disk_leaves_no_half_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write = checkpoint.write_hashed

    def full(path: Path, parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
        data = b"".join(parts)
        if path.name == name:
            path.write_bytes(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, [data])

    monkeypatch.setattr(checkpoint, "write_hashed", full)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(folder, made(40))
    assert "No space left on device" in caught.value.what
    assert "step 40" in caught.value.what
    assert caught.value.where == str(folder / "step-00000040")
    assert re.match(r"it needs [\d.]+ KiB, and [\d.,]+ .?i?B are free; free some space", caught.value.fix)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000010", "step-00000020", "step-00000030"]
    assert all(checkpoint.find_fault(path) is None for path in checkpoint.steps(folder))
    monkeypatch.undo()
    assert same(checkpoint.load(checkpoint.save(folder, made(40))), made(40))


@pytest.mark.parametrize(("inodes", "named"), [(0, True), (100, False)])
def test_the_number_of_files_is_named_only_where_it_is_at_its_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, inodes: int, named: bool
) -> None:
    disk = os.statvfs(folder)
    # block sizes, then blocks: all, free, free to this user; then files: all, free, free to this user; flags, longest name
    few = os.statvfs_result((4096, 4096, 1000, 43, 43, 100, inodes, inodes, disk.f_flag, disk.f_namemax))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_hashed", full)
    monkeypatch.setattr(os, "statvfs", lambda _: few)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(folder, made(40))
    assert ("df -i" in caught.value.fix) == named
    assert ("172.0 KiB are free" in caught.value.fix) != named


def test_files_of_many_pieces_are_whole_and_their_damage_is_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashed_file, "PIECE", 100)
    path = checkpoint.save(tmp_path, made(1))
    assert same(checkpoint.load(path), made(1))
    data = (path / "model.safetensors").read_bytes()
    hashes = json.loads((path / "manifest.json").read_text())["files"]["model.safetensors"]["sha256"]
    assert hashes == [hashlib.sha256(data[start : start + 100]).hexdigest() for start in range(0, len(data), 100)]
    (path / "model.safetensors").write_bytes(data[:250] + b"?" + data[251:])
    assert "from byte 200 on" in (checkpoint.find_fault(path) or "")
    for damaged in (data[:300], data + b"?"):
        (path / "model.safetensors").write_bytes(damaged)
        assert f"{len(damaged):,} bytes, not {len(data):,}" in (checkpoint.find_fault(path) or "")


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, gate = checkpoint.save, threading.Event()

    def slow(folder: Path, state: Checkpoint, group: Any) -> Path:
        assert gate.wait(10)
        return save(folder, state, group)

    monkeypatch.setattr(checkpoint, "save", slow)
    state = made(1)
    with Saver(tmp_path, keep=1) as saver:
        saver.save(state, best=None)
        state.model["weight"].zero_()
        state.state["guard"]["scale"] = 0.5
        saver.check()
        assert not list(tmp_path.iterdir())
        gate.set()
        saver.save(made(2), best=1)
    assert same(checkpoint.load(tmp_path / "step-00000001"), made(1))
    assert same(checkpoint.load(tmp_path / "step-00000002"), made(2))


def test_a_save_that_failed_beside_training_is_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with Saver(tmp_path / "checkpoints", keep=1) as saver:
        saver.save(made(1), best=None)
        assert saver.writing is not None
        saver.writing.join(10)
        with pytest.raises(CheckpointError, match="step 1"):
            saver.check()
    with pytest.raises(CheckpointError, match="step 1"), Saver(tmp_path / "checkpoints", keep=1) as saver:
        saver.save(made(1), best=None)


def save_and_end(folder: Path, error: BaseException) -> None:
    with Saver(folder, keep=1) as saver:
        saver.save(made(1), best=None)
        raise error


def test_who_asks_twice_does_not_wait_and_any_other_end_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, gate = checkpoint.save, threading.Event()
    monkeypatch.setattr(checkpoint, "save", lambda folder, state, _: gate.wait(10) and save(folder, state))
    with pytest.raises(KeyboardInterrupt):
        save_and_end(tmp_path / "once", KeyboardInterrupt())
    assert not (tmp_path / "once").exists()
    gate.set()
    with pytest.raises(ZeroDivisionError):
        save_and_end(tmp_path / "twice", ZeroDivisionError())
    assert checkpoint.find_fault(tmp_path / "twice" / "step-00000001") is None


def test_a_save_that_failed_is_told_beside_what_ended_training(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ZeroDivisionError) as caught:
        save_and_end(tmp_path / "checkpoints", ZeroDivisionError())
    assert "step 1 could not be written" in caught.value.__notes__[0]


@pytest.mark.parametrize("call", ["mkdir", "rename"])
def test_a_folder_that_cannot_be_written_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    real = getattr(Path, call)

    def refused(path: Path, *arguments: Any, **options: Any) -> Any:
        if "step-00000040" in path.name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, call, refused)
    with pytest.raises(CheckpointError, match="Permission denied"):
        checkpoint.save(folder, made(40))
    monkeypatch.undo()
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000010", "step-00000020", "step-00000030"]


def test_the_folder_of_checkpoints_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path / "checkpoints", made(1))
    assert str(tmp_path) in caught.value.where


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(folder: Path) -> None:
    (folder / "step-00000030" / "model.safetensors").write_bytes(b"")
    assert same(checkpoint.load(checkpoint.save(folder, made(30))), made(30))


def test_the_newest_and_the_best_stay(folder: Path) -> None:
    for step in (40, 50):
        checkpoint.save(folder, made(step))
    prune(folder, keep=2, also={10, 99})
    assert steps_in(folder) == [10, 40, 50]
    assert all(checkpoint.find_fault(path) is None for path in checkpoint.steps(folder))


def steps_in(folder: Path) -> list[int]:
    return [checkpoint.step_of(path) for path in checkpoint.steps(folder)]


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_neither_counted_nor_deleted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    inspector = Inspector()
    flip_a_bit(folder / "step-00000030" / "model.safetensors")
    prune(folder, 1, set(), inspector)
    assert steps_in(folder) == [20, 30]
    checkpoint.save(folder, made(25))
    prune(folder, 1, set(), inspector)
    assert steps_in(folder) == [25, 30]
    assert [message.split(" (")[0] for message in caplog.messages] == ["checkpoint of step 30 is damaged"]
    with Saver(folder, 1, inspector) as saver:
        saver.save(made(30), best=None)  # the same step, whole
    assert steps_in(folder) == [30]
    assert same(checkpoint.load(folder / "step-00000030"), made(30))


def fail_to_read(monkeypatch: pytest.MonkeyPatch, inode: int, code: int) -> None:
    """From now on the system refuses to read a file."""
    real = os.pread

    def pread(descriptor: int, *arguments: int) -> bytes:
        if os.fstat(descriptor).st_ino == inode:
            raise OSError(code, os.strerror(code))
        return real(descriptor, *arguments)

    monkeypatch.setattr(os, "pread", pread)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_what_cannot_be_read_is_not_called_damaged_not_passed_over_and_not_deleted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    file = folder / "step-00000030" / "optimizer.safetensors"
    fail_to_read(monkeypatch, file.stat().st_ino, code)
    with pytest.raises(UnreadableError, match=os.strerror(code).lower()) as caught:
        checkpoint.newest(folder)
    assert caught.value.where == str(file)
    prune(folder, 1, set())
    assert steps_in(folder) == [20, 30]
    assert len(caplog.messages) == 1
    assert "damaged" not in caplog.text


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refused)
    with pytest.raises(UnreadableError, match="permission denied") as caught:
        checkpoint.newest(folder)
    assert caught.value.where == str(folder)


def test_each_checkpoint_is_hashed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []
    real = checkpoint.find_fault
    monkeypatch.setattr(checkpoint, "find_fault", lambda path, *_: (looked_at.append(path.name), real(path))[1])
    inspector = Inspector()
    assert checkpoint.newest(folder, inspector.find_fault) == folder / "step-00000030"
    checkpoint.load(folder / "step-00000030", find=inspector.find_fault)
    with Saver(folder, 3, inspector) as saver:
        for step in (40, 50):
            saver.save(made(step), best=None)
    assert sorted(looked_at) == [f"step-000000{step}" for step in (10, 20, 30, 40, 50)]


def stopped(step: int) -> Checkpoint:
    """What a run writes that is stopped off its schedule."""
    return replace(made(step), state=made(step).state | {"scheduled": False})


def test_the_checkpoint_of_a_stop_counts_nowhere_and_goes_when_a_newer_one_is_there(folder: Path) -> None:
    with Saver(folder, 2) as saver:
        for state, left in ((stopped(33), [20, 30, 33]), (stopped(36), [20, 30, 36]), (made(40), [30, 40])):
            saver.save(state, best=33)
            saver.wait()
            assert steps_in(folder) == left


def test_the_checkpoint_of_a_stop_is_replaced_by_the_regular_one_of_its_step(folder: Path) -> None:
    checkpoint.save(folder, stopped(40))
    with Saver(folder, 9) as saver:
        saver.save(made(40), best=None)
    assert same(checkpoint.load(folder / "step-00000040"), made(40))
    assert steps_in(folder) == [10, 20, 30, 40]


def test_a_replacement_that_is_cut_short_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise OSError(errno.EIO, "Input/output error")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(CheckpointError, match="Input/output error"):
        checkpoint.save(folder, stopped(30))
    monkeypatch.undo()
    assert same(checkpoint.load(folder / "step-00000030"), made(30))
    # Killed between the two renames.
    (folder / "step-00000030").rename(folder / ".step-00000030.replaced")
    checkpoint.recover(folder)
    assert same(checkpoint.load(folder / "step-00000030"), made(30))
    # Killed behind both.
    shutil.copytree(folder / "step-00000020", folder / ".step-00000030.replaced")
    checkpoint.recover(folder)
    assert same(checkpoint.load(folder / "step-00000030"), made(30))


def test_steps_of_nine_digits_come_behind_those_of_eight(folder: Path) -> None:
    for step in (99_999_999, 100_000_000):
        checkpoint.save(folder, made(step))
    assert steps_in(folder) == [10, 20, 30, 99_999_999, 100_000_000]


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", EVERY_FILE)
@pytest.mark.parametrize("kind", ["40 GB", "a pipe", "a link to a device", "a link to a copy", "a folder"])
def test_what_stands_in_the_place_of_a_file_is_a_fault_at_once(folder: Path, name: str, kind: str) -> None:
    path = folder / "step-00000030" / name
    if kind == "40 GB":
        os.truncate(path, 40 << 30)
    else:
        path.rename(folder / "copy")
        if kind == "a pipe":
            os.mkfifo(path)
        elif kind == "a folder":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero" if kind == "a link to a device" else folder / "copy")
    before = time.monotonic()
    fault = checkpoint.find_fault(path.parent)
    assert time.monotonic() - before < 2
    assert fault is not None
    assert name in fault
    assert checkpoint.newest(folder) == folder / "step-00000020"


def test_nothing_is_written_through_a_link(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "mine").write_text("as it was")
    (folder / "link").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="symbolic link") as caught:
        checkpoint.save(folder / "link", made(40))
    assert str(folder / "link") in caught.value.where
    for name in (".step-00000040.partial", ".step-00000040.replaced", "step-00000040"):
        (folder / name).symlink_to(elsewhere)
    assert same(checkpoint.load(checkpoint.save(folder, made(40))), made(40))
    assert not (folder / "step-00000040").is_symlink()
    prune(folder, 1, set())
    assert [path.name for path in elsewhere.iterdir()] == ["mine"]
    assert (elsewhere / "mine").read_text() == "as it was"


def test_checkpoints_of_different_models_have_no_mean(folder: Path) -> None:
    other = made(40)
    other.model["weight"] = torch.zeros(8, 1)  # which would fit by broadcasting
    checkpoint.save(folder, other)
    with pytest.raises(InputError, match=r"weight is float32 \[8, 8\] there and float32 \[8, 1\] here") as caught:
        checkpoint.average(checkpoint.steps(folder))
    assert "step-00000010" in caught.value.where


def test_what_killed_processes_left_is_swept_away(folder: Path) -> None:
    shutil.copytree(folder / "step-00000010", folder / ".step-00000010.deleted")
    shutil.copytree(folder / "step-00000010", folder / ".step-00000025.partial")
    prune(folder, keep=2, also=set())
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000020", "step-00000030"]


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_a_pickle_is_refused_and_never_run(folder: Path, tmp_path: Path, name: str, form: str) -> None:
    canary, path = tmp_path / "canary", folder / "step-00000030"
    if form == "pickle":
        (path / name).write_bytes(pickle.dumps(Canary(canary)))
    else:
        torch.save({"weight": Canary(canary)}, path / name)
    # Its author can write a manifest too.
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = checkpoint.fingerprint(path / name)
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.find_fault(path) is None
    with pytest.raises(InputError, match="not a safetensors file") as caught:
        checkpoint.load(path)
    assert str(path / name) in caught.value.where
    assert not canary.exists()
    data = (path / name).read_bytes()
    pickle.loads(data) if form == "pickle" else torch.load(io.BytesIO(data), weights_only=False)
    assert canary.exists()  # the canary does sing where a pickle is run


@pytest.mark.parametrize(
    "header",
    [
        b"\xff" * 8 + b"{}",
        (40).to_bytes(8, "little") + b"{",
        b'{"w":{"dtype":"F32","shape":[10000000000],"data_offsets":[0,40000000000]}}',
    ],
)
def test_a_broken_header_is_refused_before_memory_is_taken(tmp_path: Path, header: bytes) -> None:
    data = header if header[:1] != b"{" else len(header).to_bytes(8, "little") + header
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(InputError, match="not a safetensors file"):
        load_tensors(tmp_path / "model.safetensors")


def test_the_average_is_the_mean(folder: Path) -> None:
    paths = checkpoint.steps(folder)
    found = checkpoint.average(paths)
    models = [made(step).model for step in (10, 20, 30)]
    for name in ("weight", "transposed"):
        mean = torch.stack([model[name].double() for model in models]).mean(dim=0)
        torch.testing.assert_close(found[name], mean.float(), rtol=1e-7, atol=1e-8)
    assert found["half"].dtype == torch.bfloat16
    assert found["count"] == 30
    assert torch.equal(checkpoint.average(paths[:1])["weight"], made(10).model["weight"])
