"""What is known about a large file is not read again, and is forgotten when the file changes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kilolayer.data import file_facts
from kilolayer.data.cache_folder import content_key, sha256
from kilolayer.data.file_facts import known


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_facts, "LARGE_FILE", 10)
    monkeypatch.setattr(file_facts, "SETTLED_SECONDS", -1)


class Reader:
    """Counts how often the file is read."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, path: Path) -> int:
        self.times += 1
        return len(path.read_bytes())


def test_a_large_file_is_read_once(tmp_path: Path) -> None:
    path, read = tmp_path / "text", Reader()
    path.write_text("x" * 20)
    assert [known(path, "length", read, tmp_path / "cache") for _ in range(3)] == [20] * 3
    assert known(path, "other", read, tmp_path / "cache") == 20
    assert known(path, "length", read, tmp_path / "cache") == 20
    assert read.times == 2
    known(path, "length", read, None)
    assert read.times == 3


def test_a_change_is_seen_even_with_the_old_size_and_time(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("x" * 20)
    before, cache = path.stat(), tmp_path / "cache"
    first = content_key("a", [path], cache)
    time.sleep(0.02)
    path.write_text("y" * 20)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = content_key("a", [path], cache)
    assert first != second
    assert second == content_key("a", [path])
    other = tmp_path / "other"
    other.write_text("z" * 20)
    os.replace(other, path)
    assert known(path, "sha256", sha256, cache) == sha256(path)


def test_small_and_fresh_files_are_read_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / "text", Reader()
    path.write_text("x" * 9)
    for _ in range(2):
        known(path, "length", read, tmp_path / "cache")
    assert read.times == 2
    path.write_text("x" * 20)
    monkeypatch.setattr(file_facts, "SETTLED_SECONDS", 60)
    for _ in range(2):
        known(path, "length", read, tmp_path / "cache")
    assert read.times == 4
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"stamp": 1, "facts": {}}', '{"facts": 3}'])
def test_a_record_that_cannot_be_used_is_replaced(tmp_path: Path, record: str) -> None:
    path, read, cache = tmp_path / "text", Reader(), tmp_path / "cache"
    path.write_text("x" * 20)
    known(path, "length", read, cache)
    (kept,) = cache.iterdir()
    kept.write_text(record)
    assert [known(path, "length", read, cache) for _ in range(2)] == [20, 20]
    assert read.times == 2
