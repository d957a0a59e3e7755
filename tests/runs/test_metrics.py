"""metrics.jsonl: a broken line loses itself and nothing else, for a resumed run and for the report alike."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from kilolayer.errors import InputError, WriteError
from kilolayer.report.metric_rows import read_rows
from kilolayer.report.record import read_record
from kilolayer.runs import checkpoint
from kilolayer.runs.metrics import Metrics
from kilolayer.runs.trackers import TensorBoard
from kilolayer.training.loop import train
from tests.fixtures.small_runs import new_run, record, task_of

BROKEN = {
    "not UTF-8": b'{"kind": "train", "step": 3, "text": "\xff"}',
    "half a line": b'{"kind": "train", "st',
    "no table": b"[1, 2]",
    "no step": b'{"kind": "train"}',
    "a step that is none": b'{"kind": "train", "step": "3"}',
    "an infinite step": b'{"kind": "train", "step": Infinity}',
    "a step of 400 digits": b'{"kind": "train", "step": ' + b"9" * 400 + b"}",
    "a number of 5,000 digits": b'{"kind": "train", "step": 3, "loss": ' + b"9" * 5000 + b"}",
    "nested": b"[" * 100_000,
    "zeros": b"\0" * 1000,
}


def line(step: int) -> bytes:
    return json.dumps({"kind": "train", "step": step, "loss": 1.5}).encode() + b"\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(map(line, range(1, 10))))
    return tmp_path


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_line_loses_itself_alone_and_is_named(folder: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    lines = [line(1), line(2), BROKEN[kind] + b"\n", *map(line, range(4, 10))]
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))
    assert [row["step"] for row in read_record(folder).train] == [1, 2, 4, 5, 6, 7, 8, 9]
    assert "Line 3 of metrics.jsonl cannot be read and is left out." in read_record(folder).notes
    Metrics(folder, 8)
    assert caplog.messages == [f"{folder / 'metrics.jsonl'}: line 3 of metrics.jsonl cannot be read and is left out"]
    assert (folder / "metrics.jsonl").read_bytes() == b"".join(line(step) for step in (1, 2, 4, 5, 6, 7, 8))


def test_many_broken_lines_are_one_warning(folder: Path) -> None:
    (folder / "metrics.jsonl").write_bytes(b"?\n" * 12 + line(1) + b"?\n" * 30)
    found = read_rows(folder / "metrics.jsonl")
    assert [row["step"] for row in found.rows] == [1]
    assert found.warning == ("lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 32 more of metrics.jsonl cannot be read and are left out")


def test_a_last_line_without_an_end_is_no_damage(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(line(10)[:20])
    Metrics(folder, 9)
    assert not caplog.messages
    assert (folder / "metrics.jsonl").read_bytes() == b"".join(map(line, range(1, 10)))


def test_a_line_that_is_too_long_is_passed_over_in_little_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kilolayer.report.metric_rows.LONGEST", 64)
    for length in (63, 64, 65, 127, 128, 129, 1000):
        long = b'{"kind": "train", "step": 2, "x": "'.ljust(length - 3, b"x") + b'"}\n'
        (folder / "metrics.jsonl").write_bytes(line(1) + long + line(3))
        found = read_rows(folder / "metrics.jsonl")
        assert [row["step"] for row in found.rows] == ([1, 2, 3] if length <= 64 else [1, 3])
        assert found.broken == ([] if length <= 64 else [2])


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a folder", "40 GB"])
def test_what_stands_in_its_place_is_refused_at_once(folder: Path, kind: str) -> None:
    path = folder / "metrics.jsonl"
    (folder / "config.toml").touch()
    if kind == "40 GB":
        os.truncate(path, 40 << 30)
    else:
        path.unlink()
        {"a pipe": os.mkfifo, "a folder": os.mkdir, "a device": lambda path: os.symlink("/dev/zero", path)}[kind](path)
    before = time.monotonic()
    with pytest.raises(InputError) as caught:
        Metrics(folder, 3)
    assert caught.value.where == str(path)
    assert any("metrics.jsonl cannot be read" in note for note in read_record(folder).notes)
    assert time.monotonic() - before < 2


@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard"])
def test_nothing_is_written_through_a_link(folder: Path, tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    target = elsewhere / "mine"
    if name == "tensorboard":
        pytest.importorskip("tensorboard")
        target = elsewhere
    else:
        target.write_bytes(b"".join(map(line, range(1, 10))))
        (folder / name).unlink()
    (folder / name).symlink_to(target)
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    if name == "tensorboard":
        with pytest.raises(WriteError, match="symbolic link"):
            TensorBoard().start(folder, {}, 3)
    else:
        Metrics(folder, 3).write("train", 4, loss=1.0)
        (folder / name).unlink()
        (folder / name).symlink_to(target)
        metrics = Metrics.__new__(Metrics)
        metrics.path, metrics.trackers = folder / name, ()
        with pytest.raises(WriteError):
            metrics.write("train", 4, loss=1.0)
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before


def test_a_byte_that_is_no_text_does_not_hold_up_a_resume(tmp_path: Path, corpus: Path) -> None:
    run = new_run(tmp_path / "run", corpus, train={"save_every": 3, "keep": 9})
    train(run, task_of(run))
    expected = record(run)
    path = run.folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"\xff" + lines[1], *lines[2:]]))
    (checkpoint.path_of(run.checkpoints, 6) / "state.json").unlink()
    assert train(run, task_of(run), resume=True) == 0

    def without(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row for index, row in enumerate(rows) if index != 1]

    found = record(run)
    assert found["metrics"] == without(expected["metrics"])
    assert {**found, "metrics": None} == {**expected, "metrics": None}
