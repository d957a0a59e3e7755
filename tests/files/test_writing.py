"""Files are whole or absent, and nothing is written through a link."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kilolayer.errors import WriteError
from kilolayer.files.writing import append, make_folder, write


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("mine\n")
    return path


def test_a_file_takes_the_place_of_a_link_and_not_of_what_it_points_at(tmp_path: Path, victim: Path) -> None:
    (path := tmp_path / "file").symlink_to(victim)
    write(path, "new\n")
    assert victim.read_text() == "mine\n"
    assert path.read_text() == "new\n"
    assert not path.is_symlink()


@pytest.mark.parametrize("made", ["link", "dangling link", "pipe", "folder"])
def test_nothing_is_added_to_what_is_no_file(tmp_path: Path, victim: Path, made: str) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    {
        "link": lambda: path.symlink_to(victim),
        "dangling link": lambda: path.symlink_to(other),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }[made]()
    with pytest.raises(WriteError) as caught:
        append(path, "more\n")
    assert caught.value.where == str(path)
    assert victim.read_text() == "mine\n"
    assert not other.exists()


def test_other_names_of_a_file_keep_what_they_had(tmp_path: Path, victim: Path) -> None:
    os.link(victim, path := tmp_path / "file")
    append(path, "more\n")
    assert victim.read_text() == "mine\n"
    assert path.read_text() == "mine\nmore\n"
    append(path, "and more\n")
    assert path.read_text() == "mine\nmore\nand more\n"


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (path := tmp_path / "folder").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WriteError, match="symbolic link"):
        make_folder(path)
    make_folder(tmp_path / "new" / "below")
    make_folder(tmp_path / "new" / "below")
    assert (tmp_path / "new" / "below").is_dir()


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    write(path := tmp_path / "file", "old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if call == "write":
        monkeypatch.setattr(os, "fdopen", fail)
    else:
        monkeypatch.setattr(os, call, fail)
    with pytest.raises(WriteError, match="no space left on device") as caught:
        write(path, "new")
    assert caught.value.where == str(path)
    assert "free some space" in caught.value.fix
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["a\0b", "x" * 300])
def test_odd_names_are_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(WriteError):
        write(tmp_path / name, "text")
    assert not list(tmp_path.iterdir())
