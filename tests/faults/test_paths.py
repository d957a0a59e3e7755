"""Names of files and folders: any UTF-8 works everywhere, what is none is refused before any work, and so is what may not be
read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w

from kilolayer.cli.main import main
from tests.faults.children import NOBODY, run
from tests.faults.run_forms import FORMS, QUICK

EMOJI = "\U0001f600 caf\u00e9 \u05e9 'quoted' \"twice\" \\ # [x]"
NOT_UTF8 = os.fsdecode(b"caf\xe9")
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.mark.slow
@pytest.mark.parametrize("form", [QUICK[0], pytest.param(QUICK[1], marks=pytest.mark.slow)])
def test_an_emoji_in_every_path(form: str, corpus: Path, tmp_path: Path) -> None:
    text = tmp_path / EMOJI / "text"
    shutil.copytree(corpus, text)
    config = tmp_path / EMOJI / f"{EMOJI}.toml"
    config.write_text(tomli_w.dumps(FORMS[form].table(text, train={"steps": 2})), encoding="utf-8")
    folder = tmp_path / EMOJI / "run"
    (tmp_path / "input").write_bytes(FORMS[form].typed)
    for words in (["train", config, "--run", folder], ["train", "--resume", folder], ["evaluate", folder], ["report", folder]):
        code, _, err = run(words, tmp_path)
        assert code == 0, err
    code, out, err = run([word.replace("RUN", str(folder)) for word in FORMS[form].verb], tmp_path, stdin=tmp_path / "input")
    assert (code, bool(out)) == (0, True), err
    (folder / "scores.json").unlink()
    code, _, err = run(["train", "--resume", folder], tmp_path)
    assert code == 0, err


OPTIONS = ("--data.folder", "--data.manifest", "--tokenizer.path", "--train.start_from", "--run")


@pytest.mark.matrix(2)
@pytest.mark.parametrize("option", OPTIONS)
def test_a_name_that_is_not_utf8_is_refused_before_any_work(
    option: str, configured: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    where = ["--run", str(folder)] if option != "--run" else []
    assert main(["train", str(configured("translation")), *where, option, str(tmp_path / NOT_UTF8)]) == 2
    told = capsys.readouterr().err
    assert "caf\\udce9" in told
    assert "rename" in told
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_current_folder_that_is_not_utf8_is_refused_where_a_path_would_be_kept(
    configured: Callable[..., Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    here = tmp_path / NOT_UTF8
    here.mkdir()
    (here / "text").symlink_to(corpus)
    shutil.copytree(corpus, here / "own")
    monkeypatch.chdir(here)
    config = str(configured("translation"))
    for words in (["--run", "run"], ["--run", str(tmp_path / "run"), "--data.folder", "own"]):
        assert main(["train", config, *words]) == 2
        assert "not UTF-8" in capsys.readouterr().err
    assert main(["train", config, "--run", str(tmp_path / "run"), "--data.folder", "text", "--train.steps", "1"]) == 0


@pytest.mark.matrix(3)
@pytest.mark.parametrize(("name", "what"), [("circle", "circle"), ("x" * 300, "too long"), ("pipe", "regular file")])
def test_paths_that_lead_nowhere_are_refused(
    name: str, what: str, configured: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    os.mkfifo(tmp_path / "pipe")
    path = str(tmp_path / name)
    typed = {
        "translation": ["--data.folder", "--tokenizer.path", "--train.start_from"],
        "language model of bytes": ["--text.train"],
    }
    for form, options in typed.items():
        for option in options:
            words = [str(configured(form)), "--run", str(tmp_path / "run"), option, path]
            if option == "--tokenizer.path":
                continue
            assert main(["train", *words]) == 2
            told = capsys.readouterr().err
            assert what in told or "does not exist" in told or "not a run" in told, (option, told)
    for words in (["report", path], ["evaluate", path], ["translate", path], ["train", "--resume", path], ["plan", path]):
        assert main(words) == 2, words
        assert capsys.readouterr().err.startswith("kilolayer: ")


@pytest.mark.slow
@as_root
@pytest.mark.parametrize("hidden", ["train.en", "valid.de", ""])
def test_data_of_another_user_is_named(
    hidden: str, corpus: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    open_folder = Path(shutil.copytree(corpus, f"/tmp/{tmp_path_factory.getbasetemp().name}-{os.getpid()}-{hidden}"))
    try:
        own = open_folder / "own"
        own.mkdir()
        os.chown(own, NOBODY, NOBODY)
        open_folder.chmod(0o755)
        config = own / "small.toml"
        config.write_text(tomli_w.dumps(FORMS["translation"].table(open_folder)))
        config.chmod(0o644)
        shut = open_folder / hidden if hidden else Path(shutil.copytree(corpus, open_folder / "shut"))
        shut.chmod(0)
        words = ["train", config, "--run", own / "run", *([] if hidden else ["--data.folder", shut])]
        code, _, err = run(words, own, user=NOBODY, KILOLAYER_CACHE=str(own / "cache"))
        assert code == 2, err
        assert "permission denied" in err
        assert str(shut) in err
        assert "Traceback" not in err
    finally:
        shutil.rmtree(open_folder)


def test_a_current_folder_that_was_deleted_is_named(tmp_path: Path) -> None:
    (gone := tmp_path / "gone").mkdir()
    leave = f"import os; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r})"
    probe = f"{leave}; from kilolayer.cli.main import main; exit(main(['plan']))"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.splitlines() == ["kilolayer: the current folder was deleted", "  go to another: cd ~"]
