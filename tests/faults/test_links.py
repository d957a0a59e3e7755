"""A run folder from a stranger: links and odd files in the places of its own send nothing elsewhere and hold nothing up."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kilolayer.runs import checkpoint
from tests.faults.children import run
from tests.faults.run_forms import FORMS

UNFINISHED = {"train": {"steps": 12, "save_every": 6}}
QUICK = ("metrics.jsonl",)
REST = ("scores.json", "log.txt", "report.html", "lock", "samples.json", "config.toml", "tokenizer.model", "test.en-de.txt")
REST += ("report.html.part", "metrics.partial", "scores.partial", "config.partial")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, finished: Callable[..., Path]) -> Path:
    """A run that has not been scored, with a checkpoint at its middle; not to be changed."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    shutil.copytree(finished("translation", **UNFINISHED), folder)
    for name in ("scores.json", "report.html", "samples.json", "test.en-de.txt", "checkpoints/step-00000012"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder


def verbs(folder: Path) -> list[list[object]]:
    words = FORMS["translation"].verb
    return [
        ["report", folder],
        ["train", "--resume", folder],
        ["evaluate", folder],
        [folder if w == "RUN" else w for w in words],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)])
def test_nothing_is_written_through_a_link(tmp_path: Path, stopped: Path, name: str) -> None:
    folder, victim = tmp_path / "run", tmp_path / "victim"
    shutil.copytree(stopped, folder)
    path = folder / name
    content = path.read_bytes() if path.exists() else b"mine\n"
    path.unlink(missing_ok=True)
    victim.write_bytes(content)
    path.symlink_to(victim)
    for words in verbs(folder):
        code, _, err = run(words, tmp_path)
        assert code in (0, 2), err
        assert "Traceback" not in err
        assert victim.read_bytes() == content, words
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run", "typed.err", "typed.out", "victim"]


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard"])
def test_a_folder_that_is_a_link_is_refused_before_a_step(tmp_path: Path, stopped: Path, name: str) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    shutil.copytree(stopped, folder)
    if (folder / name).exists():
        (folder / name).rename(elsewhere)
    else:
        elsewhere.mkdir()
        text = (folder / "config.toml").read_text()
        assert "tensorboard = false" in text
        pytest.importorskip("tensorboard")
        (folder / "config.toml").write_text(text.replace("tensorboard = false", "tensorboard = true"))
    (folder / name).symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    code, _, err = run(["train", "--resume", folder], tmp_path)
    assert code == 2, err
    assert "symbolic link" in err
    assert sorted(elsewhere.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("metrics.jsonl", "pipe"),
        ("config.toml", "endless"),
        *(
            pytest.param(name, kind, marks=pytest.mark.slow)
            for name in ("config.toml", "metrics.jsonl", "tokenizer.model", "scores.json", "log.txt", "lock")
            for kind in ("pipe", "endless")
        ),
    ],
)
def test_what_never_ends_holds_nothing_up(tmp_path: Path, stopped: Path, name: str, kind: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero")
    for words in verbs(folder):
        code, _, err = run(words, tmp_path)
        assert code in (0, 2), err
        assert "Traceback" not in err, err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["manifest.json", *(pytest.param(name, marks=pytest.mark.slow) for name in checkpoint.FILES)])
@pytest.mark.parametrize("kind", ["pipe", "endless", "40 GB"])
def test_a_checkpoint_that_never_ends_is_damaged(tmp_path: Path, stopped: Path, name: str, kind: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    (path := folder / "checkpoints" / "step-00000006" / name).unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(40 << 30)
    code, _, err = run(verbs(folder)[-1], tmp_path)
    assert code == 2, err
    assert "step 6 is damaged" in err
    assert "Traceback" not in err
