"""Questions for a run, as a user types it."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest

from kilolayer.data.grammar import pairs
from kilolayer.files.writing import unwritable
from tests.cli.typed_commands import quietly, refused, write_corpus

CONFIG = """\
task = "causal_lm"

[model]
layers = 1
dim = 16
heads = 2
ffn_dim = 32

[text]
train = "{text}"
length = 64

[tokenizer]
kind = "bytes"

[batches]
tokens = 128

[train]
steps = 2
lr = 1e-2
device = "cpu"
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("\n".join(english for english, _ in pairs(60, seed=1, unseen=False)), encoding="utf-8")
    (folder / "small.toml").write_text(CONFIG.format(text=folder / "text.txt"))
    code, _, err = quietly("train", folder / "small.toml", "--run", folder / "run")
    assert code == 0, err
    return folder / "run"


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    goals = [{"goal": f"goal {number}", "sol1": "a", "sol2": "bb", "label": number % 2} for number in range(6)]
    (tmp_path / "piqa.val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in goals))
    words = [{"context": f"It is the {number}", "continuation": "end"} for number in range(3)]
    (tmp_path / "lambada_openai.test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in words))
    return tmp_path


def test_scores_of_a_run_that_cannot_be_written_are_printed(run: Path, examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, content: str) -> None:
        raise unwritable(path, PermissionError(errno.EACCES, "permission denied"))

    monkeypatch.setattr("kilolayer.evaluate.shots.score_file.write", refuse)
    code, out, err = quietly("evaluate", run, "--tasks", "piqa", "--examples", examples, "--device", "cpu", "--json")
    assert code == 0, err
    assert [each["norm"] for each in json.loads(out)] == ["bytes", "tokens", "none"]
    assert f"not saved: the file cannot be written: permission denied: {run / 'shots.json'}" in err


def test_scores_are_printed_and_kept_by_signature(run: Path, examples: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(run, folder)
    words = ["evaluate", folder, "--tasks", "piqa,lambada_openai", "--shots", "0,2", "--examples", examples, "--device", "cpu"]
    code, out, err = quietly(*words, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [(each["task"], each["shots"], each["metric"], each["norm"]) for each in found] == [
        *(("piqa", shots, "accuracy", norm) for shots in (0, 2) for norm in ("bytes", "tokens", "none")),
        *(("lambada_openai", shots, metric, "greedy") for shots in (0, 2) for metric in ("accuracy", "perplexity")),
    ]
    assert "piqa: 6 questions after 2 examples each" in err
    assert "the beginning of 6 questions was cut off: the model reads 64 tokens at once" in err
    kept = json.loads((folder / "shots.json").read_text())
    assert list(kept) == [each["signature"] for each in found]
    assert all({**kept[each["signature"]], "weights": None} == {**each, "weights": None} for each in found)
    assert {json.dumps(each["weights"]) for each in kept.values()} == {
        json.dumps({"chosen": kept[found[0]["signature"]]["weights"]["chosen"], "steps": [2], "passed_over": []})
    }
    code, out, err = quietly(*words, "--limit", "2", "--seed", "5")
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()]
    assert ["piqa", "2", "bytes"] in [row[:3] for row in rows]
    assert any(row[:2] == ["lambada_openai", "0"] for row in rows)
    again = json.loads((folder / "shots.json").read_text())
    assert len(again) == 2 * len(kept)
    assert {signature: again[signature] for signature in kept} == kept
    new = [signature for signature in again if signature not in kept]
    assert all(signature in out.splitlines() for signature in new)
    code, _, err = quietly(*words)
    assert code == 0, err
    assert json.loads((folder / "shots.json").read_text()) == again


def test_the_folder_of_the_data_is_known(run: Path, examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (examples / "nlu").mkdir()
    (examples / "nlu" / "zeroshot").symlink_to(examples)
    monkeypatch.setenv("KILOLAYER_DATA", str(examples))
    code, out, err = quietly("evaluate", run, "--tasks", "piqa", "--json")
    assert code == 0, err
    assert len(json.loads(out)) == 3
    monkeypatch.delenv("KILOLAYER_DATA")
    lines = refused("evaluate", run, "--tasks", "piqa")
    assert lines[0] == "kilolayer: no folder with questions is given"
    assert "--examples" in lines[2]


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--tasks", "hellaswg"], "unknown question set 'hellaswg'; did you mean 'hellaswag'?"),
        (["--tasks", ""], "unknown question set ''"),
        (["--tasks", "piqa,copa"], "there are no questions for copa"),
        (["--tasks", "piqa", "--shots", "6"], "piqa has 5 examples besides the question, fewer than 6"),
        (["--tasks", "piqa", "--shots", "0,x"], "'x' is not a valid number of shots"),
        (["--tasks", "piqa", "--shots", "-1"], "'-1' is not a valid number of shots"),
        (["--tasks", "piqa", "--shots", "9999"], "'9999' is not a valid number of shots"),
        (["--tasks", "piqa", "--seed", "1"], "--seed has no effect without shots"),
        (["--tasks", "piqa", "--stride", "4"], "--stride has no effect with --tasks"),
        (["--tasks", "piqa", "--meteor"], "--meteor has no effect on a language model"),
        (["--shots", "4"], "--shots has no effect without --tasks"),
        (["--limit", "4"], "--limit has no effect without --tasks"),
    ],
)
def test_mistakes_are_told_before_any_scoring(words: list[str], what: str, run: Path, examples: Path) -> None:
    words = [*words, *(["--examples", str(examples)] if "--tasks" in words else [])]
    before = (run / "shots.json").exists()
    assert refused("evaluate", run, *words)[0].startswith(f"kilolayer: {what}")
    assert (run / "shots.json").exists() == before


def test_a_translator_is_asked_nothing(examples: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "run").mkdir()
    shutil.copy(write_corpus(tmp_path / "corpus"), tmp_path / "run" / "config.toml")
    lines = refused("evaluate", tmp_path / "run", "--tasks", "piqa", "--examples", examples)
    assert lines[0] == "kilolayer: --tasks has no effect on a translator"


@pytest.mark.parametrize("text", ["[]", '{"task:piqa": 5}', '{"a": {"task": "piqa"}}', "{"])
def test_a_file_of_scores_that_is_none_is_not_written_over(text: str, run: Path, examples: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(run, folder)
    (folder / "shots.json").write_text(text)
    lines = refused("evaluate", folder, "--tasks", "piqa", "--examples", examples)
    assert lines[1] == f"  {folder / 'shots.json'}"
    assert (folder / "shots.json").read_text() == text
