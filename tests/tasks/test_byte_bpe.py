"""A language model of byte-level BPE, from its text to what it writes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kilolayer.cli.main import main
from kilolayer.data.byte_pieces import BytePieceVocabulary
from kilolayer.errors import InputError
from kilolayer.training.loop import train
from tests.fixtures.small_runs import new_text_run, task_of

BYTE_BPE = {"kind": "byte_bpe", "vocab_size": 330}


def trained(folder: Path, corpus: Path, **tokenizer: Any) -> Path:
    run = new_text_run(folder, corpus, tokenizer=tokenizer or BYTE_BPE, train={"steps": 2, "valid_every": 2})
    task = task_of(run)
    assert train(run, task) == 0
    task.score(run.load_model(torch.device("cpu")), folder)
    return folder


def written(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert main(["generate", str(folder), "--prompt", "The old dog", "--max-tokens", "8", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_is_trained_scored_and_writes(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained(tmp_path / "run", corpus)
    (result,) = written(folder, capsys)
    assert result["prompt"] == "The old dog"
    vocabulary = BytePieceVocabulary.load(folder / "tokenizer.json")
    assert vocabulary.vocab_size == 330
    scores = json.loads((folder / "scores.json").read_text())["test"]
    # The loss of a token, over the bytes that a token stands for on average, an end of the document paid for.
    data = (corpus / "test.en").read_bytes()
    tokens = len(vocabulary.encode(data)) + 1
    nats = scores["loss"]["value"] * tokens
    assert scores["bits_per_byte"]["value"] == pytest.approx(nats / math.log(2) / len(data), rel=1e-6)


def test_a_vocabulary_from_files_trains_the_same_run(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = trained(tmp_path / "first", corpus)
    second = trained(tmp_path / "second", corpus, kind="byte_bpe", path=str(first / "tokenizer.json"))
    assert (first / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()
    assert written(first, capsys) == written(second, capsys)


def test_a_run_whose_vocabulary_is_gone_or_damaged_names_it(tmp_path: Path, corpus: Path) -> None:
    run = new_text_run(tmp_path / "run", corpus, tokenizer=BYTE_BPE)
    path = run.folder / "tokenizer.json"
    text = path.read_text()
    for damaged in (text[:-20], text.replace('"ByteLevel"', '"Metaspace"', 1), "{}", None):
        if damaged is None:
            path.unlink()
        else:
            path.write_text(damaged)
        with pytest.raises(InputError) as caught:
            run.vocabulary()
        assert caught.value.where.startswith(str(path))


def test_a_start_that_was_killed_behind_its_vocabulary_is_no_hindrance(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tokenizer.json").write_text("half of")
    run = new_text_run(tmp_path / "run", corpus, tokenizer=BYTE_BPE)
    assert run.vocabulary().digest
