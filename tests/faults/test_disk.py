"""A disk that is full, read-only or another user's: the last good checkpoint survives, and the message says what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kilolayer.runs import checkpoint
from tests.faults.children import NOBODY, run
from tests.faults.run_forms import FORMS, QUICK, assert_same

FORM = [form if form == QUICK[0] else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]
ROOT = os.geteuid() == 0
as_root = pytest.mark.skipif(not ROOT, reason="only root can mount a disk and become another user")


class Disk:
    """A disk in memory of a given size."""

    def __init__(self, folder: Path, kilobytes: int) -> None:
        self.folder = folder
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(folder)], check=True, capture_output=True
        )

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.folder)], check=True, capture_output=True)

    def fill(self) -> Path:
        """Take all that is free."""
        path = self.folder / "filler"
        with path.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return path


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Disk]]:
    folder = tmp_path / "disk"
    folder.mkdir()

    def make(kilobytes: int) -> Disk:
        try:
            return Disk(folder, kilobytes)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("this machine does not let anyone mount a disk")

    yield make
    subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)


def kilobytes_of(folder: Path) -> int:
    return int(subprocess.run(["du", "-sk", str(folder)], check=True, capture_output=True).stdout.split()[0])


OFTEN = {"train": {"save_every": 1, "keep": 6}}


@pytest.mark.slow
@as_root
@pytest.mark.parametrize("form", FORM)
def test_a_full_disk_costs_no_checkpoint_and_more_space_goes_on(
    tmp_path: Path, configured: Callable[..., Path], finished: Callable[..., Path], disk: Callable[[int], Disk], form: str
) -> None:
    options = {"train": {**FORMS[form].options.get("train", {}), **OFTEN["train"]}}
    undisturbed = finished(form, **options)
    one, all_ = kilobytes_of(checkpoint.steps(undisturbed / "checkpoints")[0]), kilobytes_of(undisturbed / "checkpoints")
    page = kilobytes_of(undisturbed / "report.html")  # which comes at the end
    small = disk(kilobytes_of(undisturbed) - all_ - page + one * 3 // 2)
    folder = small.folder / "run"
    code, _, err = run(["train", configured(form, **options), "--run", folder], tmp_path)
    assert code == 2, err
    assert "no space left on device" in err.lower()
    assert str(folder) in err
    assert "Traceback" not in err
    kept = checkpoint.steps(folder / "checkpoints")
    assert kept
    assert [checkpoint.find_fault(path) for path in kept] == [None] * len(kept)
    assert sorted((folder / "checkpoints").iterdir()) == kept  # and nothing half
    small.remount("size=100m")
    code, _, err = run(["train", "--resume", folder], tmp_path)
    assert code == 0, err
    assert_same(folder, undisturbed, form)


@pytest.mark.slow
@as_root
def test_a_read_only_run_can_be_used_and_is_not_gone_on_with(
    tmp_path: Path, finished: Callable[..., Path], disk: Callable[[int], Disk]
) -> None:
    small = disk(100_000)
    folder = small.folder / "run"
    shutil.copytree(finished("translation"), folder)
    (folder / "scores.json").unlink()
    small.remount("ro")
    for words in (["train", "--resume", folder], ["report", folder], ["evaluate", folder]):
        code, _, err = run(words, tmp_path)
        assert code == 2, err
        assert "read-only file system" in err
        assert str(folder) in err
        assert "Traceback" not in err
    (typed := tmp_path / "typed").write_bytes(FORMS["translation"].typed)
    code, out, err = run(["translate", folder], tmp_path, stdin=typed)
    assert code == 0, err
    assert out


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may look into."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
@as_root
def test_another_users_files_are_named(
    open_folder: Path, corpus: Path, configured: Callable[..., Path], finished: Callable[..., Path]
) -> None:
    own = open_folder / "own"
    own.mkdir()
    os.chown(own, NOBODY, NOBODY)
    theirs, text, cache = open_folder / "run", open_folder / "text", open_folder / "cache"
    shutil.copytree(finished("translation"), theirs)
    (theirs / "scores.json").unlink()
    shutil.copytree(corpus, text)
    text.chmod(0o755)
    shutil.copy(configured("translation", data={"folder": str(text)}), open_folder / "small.toml")
    cache.mkdir(mode=0o700)
    mine = {"user": NOBODY, "KILOLAYER_CACHE": str(own / "cache")}

    def refused(*words: object, where: Path, **options: object) -> None:
        code, _, err = run(words, own, **{**mine, **options})
        assert code == 2, err
        assert "Traceback" not in err
        assert str(where) in err, err

    train = ("train", open_folder / "small.toml", "--run")
    refused("train", "--resume", theirs, where=theirs)
    refused("report", theirs, where=theirs)
    refused(*train, theirs.parent / "new", where=theirs.parent / "new")
    refused(*train, own / "a", where=cache, KILOLAYER_CACHE=str(cache))
    (text / "train.en").chmod(0)
    refused(*train, own / "b", where=text / "train.en")
    (text / "train.en").chmod(0o644)
    for name in ("config.toml", "tokenizer.model", "checkpoints"):
        (theirs / name).chmod(0)
        refused("translate", theirs, where=theirs)
        refused(*train, own / "c", "--train.start_from", theirs, where=theirs)
        (theirs / name).chmod(0o755)
    code, _, err = run(["translate", theirs], own, **mine)
    assert code == 0, err


@pytest.mark.slow
@as_root
def test_a_user_without_a_home_is_told_what_to_set(open_folder: Path, configured: Callable[..., Path], corpus: Path) -> None:
    own = open_folder / "own"
    own.mkdir()
    os.chown(own, 12345, 12345)
    shutil.copy(configured("translation"), open_folder / "small.toml")
    code, _, err = run(["train", open_folder / "small.toml", "--run", own / "run"], own, user=12345, KILOLAYER_CACHE="")
    assert code == 2, err
    assert "set KILOLAYER_CACHE" in err
