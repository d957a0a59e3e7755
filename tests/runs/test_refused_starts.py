"""A start that is refused leaves its folder good for the same command, whatever was wrong and whenever it was found."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import kilolayer as kl
from kilolayer.errors import InputError, KilolayerError, OptionError
from kilolayer.runs.run import check_new
from tests.fixtures.small_runs import SMALL, new_text_run, table, task_of, text_table

TRAINING = {"translation": "train.de", "causal_lm": "train.en", "masked_lm": "train.jsonl", "classify": "train.tsv"}
FAULTS: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "blank": lambda path: path.write_bytes(b"\n" * path.read_bytes().count(b"\n")),
    "control characters": lambda path: path.write_bytes(b"\x01\x02\n" * path.read_bytes().count(b"\n")),
    "UTF-16": lambda path: path.write_bytes(path.read_text(encoding="utf-8").encode("utf-16")),
    "binary": lambda path: path.write_bytes(b"\xff\xfe\x00\x81" * 500),
}
LEARNED_ANYWAY = {("causal_lm", fault) for fault in ("blank", "control characters", "UTF-16", "binary")}
"""To a model of bytes, any bytes are text."""
QUICK = {("translation", "control characters"), ("causal_lm", "empty"), ("masked_lm", "binary")}
CASES = [
    pytest.param(task, fault, marks=[] if (task, fault) in QUICK else pytest.mark.slow)
    for task in TRAINING
    for fault in FAULTS
    if (task, fault) not in LEARNED_ANYWAY
]


@pytest.mark.parametrize(("task", "fault"), CASES)
def test_a_training_file_that_cannot_be_used_leaves_no_run(task: str, fault: str, corpus: Path, tmp_path: Path) -> None:
    own = shutil.copytree(corpus, tmp_path / "corpus", ignore=shutil.ignore_patterns("train.tsv" if task != "classify" else ""))
    FAULTS[fault](own / TRAINING[task])
    folder = tmp_path / "run"
    found = []
    for _ in range(2):
        with pytest.raises(KilolayerError) as caught:
            kl.train(SMALL[task](own), run=folder)
        found.append(str(caught.value))
    assert found[0] == found[1]
    assert caught.value.fix
    assert {path.name for path in folder.iterdir()} <= {"lock"}


def test_what_is_found_as_training_begins_leaves_no_run(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = new_text_run(tmp_path / "start", corpus)
    for _ in range(2):
        with pytest.raises(InputError, match="no complete checkpoint"):
            kl.train(text_table(corpus), run=tmp_path / "run", train={"start_from": start.folder})
    model = {"positions": "learned", "max_length": 4}
    for _ in range(2):
        with pytest.raises(OptionError, match="the model has 4 positions"):
            kl.train(table(corpus, model=model), run=tmp_path / "run")

    def fail(*_: object) -> None:
        raise InputError("no scores today")

    monkeypatch.setattr(kl.EncoderDecoder, "scores", fail)
    for _ in range(2):  # by the model, in its first step
        with pytest.raises(InputError, match="no scores today"):
            kl.train(table(corpus), run=tmp_path / "run")
    check_new(tmp_path / "run")


def test_a_run_that_has_taken_a_step_stays(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise InputError("no validation today")

    task = type(task_of(new_text_run(tmp_path / "other", corpus)))
    monkeypatch.setattr(task, "validate", fail)
    with pytest.raises(InputError, match="no validation today"):
        kl.train(text_table(corpus), run=tmp_path / "run", train={"valid_every": 2})
    assert [row["step"] for row in kl.load(tmp_path / "run").metrics("train")] == [1, 2]
