"""The verdicts on the figures and tables of Very Deep Transformers follow their rules."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from kilolayer.reproduce.base import get
from kilolayer.reproduce.lab import Lab
from kilolayer.reproduce.stored_run import Run
from tests.reproduce.made_up_runs import run_of, two_seeds


@pytest.mark.parametrize(
    ("word", "shallow", "deep_plain", "deep"),
    [
        ("held", 40.0, "diverged", 42.0),
        ("not held", 40.0, "diverged", 39.0),
        ("not held", 40.0, "waiting", "diverged"),
        ("not held", "failed", "diverged", "dead"),
        ("not held", 40.0, "waiting", 39.0),  # whatever becomes of the default start
        ("undecided", 40.0, "waiting", 42.0),
        ("undecided", 40.0, 39.0, 42.0),
        ("undecided", 40.0, "diverged", "finished"),  # without a score
        ("undecided", "unfinished", "diverged", 42.0),
        ("undecided", "dead", "diverged", 42.0),  # the scores of a model that died do not count
    ],
)
def test_table_1_of_admin_is_judged_by_its_rule(word: str, shallow: Any, deep_plain: Any, deep: Any) -> None:
    def runs(bleu: float | str) -> list[Run]:
        if isinstance(bleu, str):
            scores = {"bleu": 0.1, "ter": 99.0} if bleu == "dead" else {"ter": None}
            return [run_of(2.0, 1) | {"bleu": 40.0, "ter": 60.0}, run_of(None, 2, bleu) | scores]
        return [run_of(2.0, seed) | {"bleu": bleu + gap, "ter": 100 - bleu} for seed, gap in ((1, -5), (2, 5))]

    rows = {"6-6 default": runs(shallow), "60-12 default": runs(deep_plain), "6-6 Admin": runs(40.0), "60-12 Admin": runs(deep)}
    reproduction = get("admin-table1")
    assert reproduction.judge(rows).word == word
    assert reproduction.numbers(rows).rows[2] == ["6-6 Admin", "60.0", "40.0"]


@pytest.mark.parametrize(
    ("word", "plain", "ours"),
    [
        ("held", "diverged", 1.8),
        ("held", 2.4, 1.8),
        ("not held", 1.7, 1.8),
        ("not held", "waiting", "diverged"),
        ("undecided", 2.0, 1.8),
        ("undecided", "dead", 2.1),
        ("undecided", "waiting", 1.8),
        ("undecided", "diverged", "failed"),
    ],
)
def test_figure_2_of_admin_is_judged_by_its_rule(word: str, plain: Any, ours: Any) -> None:
    def runs(deep: float | str) -> list[Run]:
        """A word is what becomes of one of the two seeds."""
        second = two_seeds(deep, layers="60-12")[1]
        return [*two_seeds(2.0, layers="6-6"), run_of(1.8 if isinstance(deep, str) else deep, 1, layers="60-12"), second]

    assert get("admin-figure2").judge({"admin": runs(ours), "default": runs(plain)}).word == word


def test_a_process_that_failed_decides_nothing() -> None:
    runs = [
        {**run_of(None, outcome="failed"), "options": {"layers": "60-12"}},
        {**run_of(2.0), "options": {"layers": "6-6"}},
    ]
    assert get("admin-table3").judge({"runs": runs, "signs": {}}).word == "undecided"
    assert get("admin-figure2").judge({"admin": runs, "default": runs[::-1]}).word == "undecided"


def test_text_that_was_cut_while_it_was_written_is_written_again(tmp_path: Path) -> None:
    reproduction: Any = get("admin-table4")
    lab = Lab(tmp_path / "admin-table4", tiny=True)
    folder = reproduction._text(lab)
    whole = {path.name: path.read_text() for path in folder.glob("*.fra")}
    (folder / "lonely.fra").unlink()
    reproduction._text(lab)
    assert {path.name: path.read_text() for path in folder.glob("*.fra")} == whole


def test_a_model_that_diverges_translates_nothing_back_in_table_4_of_admin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diverged = {"outcome": "diverged", "text": "diverged at step 3", "folder": str(tmp_path)}
    monkeypatch.setattr(Lab, "compare", lambda *_: [diverged])
    reproduction: Any = get("admin-table4")
    found = reproduction.measure(Lab(tmp_path / "admin-table4", tiny=True))
    verdict = reproduction.judge(found)
    assert (verdict.word, verdict.why) == ("undecided", "the model that translates back: diverged at step 3")
    assert reproduction.numbers(found).rows == []


def test_a_translation_with_a_line_separator_is_one_line_in_table_3_of_admin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text" / "fra"
    text.mkdir(parents=True)
    (text / "test.fra").write_text("un chien dort là-bas\nun chat chante là-bas\n", encoding="utf-8")
    runs = []
    for name, first in (("6-6", "un\u2028chien"), ("60-12", "un chien dort là-bas")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test.eng-fra.txt").write_text(f"{first}\nun chat\n", encoding="utf-8")
        runs.append({"options": {"layers": name}, "folder": str(tmp_path / name), "bleu": 1.0})
    monkeypatch.setattr("kilolayer.reproduce.admin_table3.admin_depths", lambda lab: runs)
    assert set(get("admin-table3").measure(Lab(tmp_path / "admin-table3"))["signs"]) == {"6-6", "60-12"}


def test_back_translated_sentences_are_of_all_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The corpus is sorted by length."""

    def copy(_command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, options["input"], "")

    monkeypatch.setattr(subprocess, "run", copy)
    (tmp_path / "lonely.fra").write_text("".join(f"{'a' * length}\n" for length in range(1, 11)))
    reproduction: Any = get("admin-table4")
    reproduction._translate(tmp_path, tmp_path, 5)
    assert (tmp_path / "sampled.fra").read_text().split() == ["a" * length for length in (1, 3, 5, 7, 9)]
    assert (tmp_path / "sampled.eng").read_text() == (tmp_path / "sampled.fra").read_text()
