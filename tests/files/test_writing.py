"""Files are whole or absent, and nothing is written through a link."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kilolayer.errors import WriteError
from kilolayer.files.writing import append, draft_of, make_folder, remove_drafts, write


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


def killed(folder: bool, path: Path) -> list[str]:
    """What a process that is killed as it writes leaves."""
    command = "import os, signal; from pathlib import Path; from kilolayer.files.writing import draft_of, write\n"
    command += f"with draft_of(Path({str(path)!r}), folder={folder}) as draft:\n"
    command += "    write(draft / 'inside', 'text') if draft.is_dir() else None\n"
    command += "    os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == -signal.SIGKILL
    return [name for name in os.listdir(path.parent) if name.endswith(".part")]


@pytest.mark.parametrize("folder", [False, True])
def test_what_a_killed_process_left_is_removed_by_the_next_that_writes_there(tmp_path: Path, folder: bool) -> None:
    path = tmp_path / f"{'ä' * 120}.html"
    (left,) = killed(folder, path)
    write(tmp_path / "other.html", "text")
    assert (tmp_path / left).exists()  # it belongs to another file
    with draft_of(path, folder=folder) as draft:
        os.rename(draft, path)
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, "other.html"])


def test_drafts_of_a_living_process_and_of_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "file"
    others = [".file.part", ".file.0000.part", "file.00000000.part", ".other.00000000.part"]
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / ".file.00000001.part").symlink_to(path)
    os.mkfifo(tmp_path / ".file.00000002.part")
    with draft_of(path) as alive:
        write(path, "first")
        assert alive.exists()
        os.replace(alive, path)
    assert path.read_text() == ""
    (tmp_path / ".file.00000003.part").touch()
    remove_drafts(tmp_path)
    kept = {".file.part", ".file.0000.part", "file.00000000.part", "file", ".file.00000001.part", ".file.00000002.part"}
    assert {*os.listdir(tmp_path)} == kept


def test_a_draft_that_was_removed_before_its_lock_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, removed = fcntl.flock, []

    def slow(descriptor: int, how: int) -> None:
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    write(tmp_path / "file", "text")
    assert os.listdir(tmp_path) == ["file"]
    assert removed
