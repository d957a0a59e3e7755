"""From a text file to a masked language model that fills masks, as a user types it."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest

from tests.cli.typed_commands import quietly, refused

CONFIG = """\
task = "masked_lm"

[model]
layers = 2
dim = 32
heads = 2
ffn_dim = 64
recipe = "pre_ln"

[text]
train = "{text}"
valid = "{text}"
test = "{text}"
length = 24

[masking]
rate = 0.3

[tokenizer]
kind = "bpe"
vocab_size = 372

[batches]
tokens = 192

[train]
steps = 240
lr = 5e-3
warmup_steps = 10
log_every = 120
layers_every = 0
valid_every = 120
save_every = 240
device = "cpu"
"""
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Norway": "Oslo"}


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A run that has learned six sentences by heart, and what it printed."""
    folder = tmp_path_factory.mktemp("capitals")
    sentences = [f"The capital of {country} is {city}." for country, city in CAPITALS.items()]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in sentences * 20))
    (folder / "config.toml").write_text(CONFIG.format(text=folder / "text.jsonl"))
    code, out, err = quietly("train", folder / "config.toml", "--run", folder / "run")
    assert code == 0, err
    return folder / "run", out, err


def test_training_leaves_scores_and_tells_how_to_go_on(learned: tuple[Path, str, str]) -> None:
    folder, out, err = learned
    scores = json.loads((folder / "scores.json").read_text())["test"]
    assert set(scores) == {"accuracy", "perplexity", "loss"}
    assert scores["accuracy"]["value"] > 50
    assert "validation loss" in err
    assert "accuracy" in err
    assert f'kilolayer fill {folder} "a <mask> text"' in out + err
    assert "<mask>" in (folder / "report.html").read_text().replace("&lt;", "<").replace("&gt;", ">")
    code, out, _ = quietly("evaluate", folder, "--json")
    assert code == 0
    assert json.loads(out)["scores"]["test"] == scores


def test_what_was_learned_by_heart_is_filled_in(learned: tuple[Path, str, str]) -> None:
    for country, city in CAPITALS.items():
        code, out, err = quietly("fill", learned[0], f"The capital of <mask> is {city}.", "--json")
        assert code == 0, err
        (found,) = json.loads(out)
        assert found["filled"] == f"The capital of {country} is {city}."
        (guesses,) = found["masks"]
        assert len(guesses) == 5
        assert guesses[0]["token"] == f" {country}"
        assert guesses[0]["probability"] > 0.5
        assert sum(guess["probability"] for guess in guesses) <= 1.0 + 1e-6


def test_lines_of_standard_input_are_filled_in_order(learned: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    typed = "".join(f"The capital of <mask> is {city}.\n" for city in CAPITALS.values())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
    code, out, err = quietly("fill", learned[0], "--top", "2")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[::2] == [f"The capital of {country} is {city}." for country, city in CAPITALS.items()]
    for line, country in zip(lines[1::2], CAPITALS, strict=True):
        assert line.startswith(f"  1: ' {country}' ")
        assert line.count("%") == 2


def test_the_text_may_stand_behind_the_flags_and_begin_with_a_dash(learned: tuple[Path, str, str]) -> None:
    text = "The capital of <mask> is Oslo."
    first = quietly("fill", learned[0], text, "--top", "2")
    assert first[0] == 0
    assert quietly("fill", learned[0], "--top", "2", text) == first
    code, out, err = quietly("fill", learned[0], "--top", "2", "--", f"-{text}")
    assert code == 0, err
    assert out.startswith("-The capital of")


def test_the_log_counts_what_the_loss_is_the_mean_of(learned: tuple[Path, str, str]) -> None:
    assert "  masked tokens/s " in learned[2]
    assert "masked tokens per second" in (learned[0] / "report.html").read_text()


def test_mistakes_are_told(learned: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = learned[0]
    assert refused("fill", run, "no masks here")[0] == "kilolayer: the text has no mask"
    assert "but the model reads 22 at once" in refused("fill", run, "The capital " * 30 + "<mask>")[0]
    assert "must be 1 to 1,000" in " ".join(refused("fill", run, "<mask>", "--top", "0"))
    assert refused("fill", tmp_path, "<mask>")[0] == "kilolayer: this is not a run"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"<mask> good\n\xff<mask>\n")))
    lines = refused("fill", run)
    assert lines[0] == "kilolayer: the text is not valid UTF-8: byte 0xff"
    assert lines[1].strip() == "standard input, line 2, byte 1"
    wrong = refused("generate", run, "--prompt", "The")
    assert wrong[0] == "kilolayer: this run is a masked language model"
    assert f"kilolayer fill {run}" in wrong[2]


def test_a_run_of_another_task_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('task = "translation"\n')
    assert refused("fill", tmp_path, "a <mask>")[0] == "kilolayer: this run is a translator"


def test_scores_of_a_run_without_a_test_part_are_refused(learned: tuple[Path, str, str], tmp_path: Path) -> None:
    run = shutil.copytree(learned[0], tmp_path / "run")
    (run / "scores.json").write_text("{}")
    assert "the run has no test set" in refused("evaluate", run)[0]
