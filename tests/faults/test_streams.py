"""Training does not depend on anyone reading, and what is read cannot give orders to a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.children import ended, run, start
from tests.faults.run_forms import FORMS, QUICK, assert_same

FORM = [form if form == QUICK[0] else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORM)
def test_a_reader_of_the_log_that_goes_away_ends_nothing(
    tmp_path: Path, configured: Callable[..., Path], finished: Callable[..., Path], form: str
) -> None:
    os.mkfifo(pipe := tmp_path / "log")
    process = start(["train", configured(form), "--run", tmp_path / "run"], err=pipe)
    with pipe.open() as log:
        assert log.readline()
    assert ended(process) == 0
    assert_same(tmp_path / "run", finished(form), form)
    assert "step 6/6" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["err", pytest.param("out", marks=pytest.mark.slow)])
def test_a_full_disk_behind_a_stream_ends_nothing(
    tmp_path: Path, configured: Callable[..., Path], finished: Callable[..., Path], place: str
) -> None:
    process = start(["train", configured("translation"), "--run", tmp_path / "run"], **{place: "/dev/full"})
    assert ended(process) == 0
    assert_same(tmp_path / "run", finished("translation"), "translation")


@pytest.mark.slow
def test_closed_streams_end_nothing(tmp_path: Path, configured: Callable[..., Path], finished: Callable[..., Path]) -> None:
    words = ["-m", "kilolayer", "train", str(configured("translation")), "--run", str(tmp_path / "run")]
    line = '"$@" <&- >&- 2>&-'
    assert subprocess.run(["bash", "-c", line, "bash", sys.executable, *words], check=False).returncode == 0
    assert_same(tmp_path / "run", finished("translation"), "translation")


def test_output_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    err = tmp_path / "err"
    assert ended(start(["recipes"], out="/dev/full", err=err)) == 2
    assert "the output cannot be written: no space left on device" in err.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_any_locale_will_do(tmp_path: Path, finished: Callable[..., Path], encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    for words in (["recipes", "admin"], ["translate", str(finished("translation"))]):
        done = subprocess.run(
            [sys.executable, "-m", "kilolayer", *words],
            input="ein Über\n".encode(),
            capture_output=True,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert b"Traceback" not in done.stderr


SEQUENCES = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e"


@pytest.mark.slow
@pytest.mark.parametrize("form", FORM)
def test_text_and_names_give_no_orders_to_a_terminal(
    tmp_path: Path, corpus: Path, configured: Callable[..., Path], form: str
) -> None:
    spoiled = tmp_path / "corpus"
    spoiled.mkdir()
    for path in corpus.iterdir():
        names, lines = [], path.read_text().splitlines()
        if path.suffix == ".tsv":
            names, lines = [f"{lines[0]}\n"], [line.replace("\t", f" {SEQUENCES}\t") for line in lines[1:]]
        (spoiled / path.name).write_text("".join([*names, *(f"{line} {SEQUENCES}\n" for line in lines)]))
    sections: dict[str, dict[str, Any]] = {"data": {"folder": str(spoiled)}, "tokenizer": {"vocab_size": 100}}
    for section, words, suffix in (("text", "language", "en"), ("examples", "classifier", "tsv")):
        if words in form:
            sections = {section: {name: str(spoiled / f"{name}.{suffix}") for name in ("train", "valid", "test")}}
    folder = tmp_path / f"run{SEQUENCES}"
    for words in (
        ["train", configured(form, **sections), "--run", folder],
        ["train", "--resume", folder],
        ["evaluate", folder],
        ["report", folder],
        ["translate", tmp_path / f"absent{SEQUENCES}"],
    ):
        code, out, err = run(words, tmp_path)
        assert code == (2 if words[0] == "translate" else 0), err
        assert not set(SEQUENCES) & {"\x1b", "\x07", "\x9b", "\u202e"} & set(out + err)
    assert "\x1b" not in (folder / "log.txt").read_text()


@pytest.mark.slow
def test_ctrl_c_ends_any_verb_without_a_word(tmp_path: Path, finished: Callable[..., Path]) -> None:
    os.mkfifo(pipe := tmp_path / "lines")
    process = start(["translate", finished("translation")], stdin=pipe, out=tmp_path / "out", err=tmp_path / "err")
    with pipe.open("w") as lines:  # which stays open: the verb waits for more
        lines.write("the dog\n")
        lines.flush()
        time.sleep(2)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        assert ended(process) == 130
    assert (tmp_path / "err").read_text() == ""
