"""Whatever stands where a file is expected, reading ends soon, in little memory, with the path named."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kilolayer.errors import InputError
from kilolayer.files.reading import read_bytes, read_json, read_text


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(40 << 30)


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda path: None, "does not exist"),
    "a folder": (lambda path: path.mkdir(), "is a directory"),
    "a pipe": (lambda path: os.mkfifo(path), "not a regular file"),
    "a device without end": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "a link to itself": (lambda path: path.symlink_to(path), "too many levels of symbolic links"),
    "40 GB": (sparse, "42,949,672,960 bytes"),
    "half a character": (lambda path: path.write_bytes(b'"\xe2\x82'), "not UTF-8|not valid JSON"),
    "brackets without end": (lambda path: path.write_text("[" * 200_000), "nested too deeply"),
    "a number of 5,000 digits": (lambda path: path.write_text("9" * 5000), "not valid JSON"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_no_json_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    make, words = ODD[name]
    make(path := tmp_path / "file")
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(InputError, match=words) as caught:
        read_json(path)
    assert str(path) in caught.value.where
    assert time.monotonic() - started < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "half \udce9"])
def test_odd_names_are_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError):
        read_bytes(tmp_path / name)


def test_the_byte_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc\xff")
    with pytest.raises(InputError, match="not UTF-8") as caught:
        read_text(tmp_path / "file")
    assert caught.value.where.endswith("byte 4")


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bytes(tmp_path / "file", most=5) == b"12345"
    with pytest.raises(InputError, match="at most 4 are read"):
        read_bytes(tmp_path / "file", most=4)
