"""The default model of a run on a CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.data.grammar import pairs
from kilolayer.runs.start import cpu_model, started_config

ROOT = Path(__file__).parents[2]
WIDTHS = {"dim": 128, "heads": 4, "ffn_dim": 256}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {**WIDTHS, "layers": 6}),
        ({"task": "causal_lm", "model": {"recipe": "pre_ln"}}, {**WIDTHS, "layers": 6}),
        ({"model": {"decoder_layers": 3}, "train": {"device": "cpu"}}, WIDTHS),
        ({"model": {"dim": 64}}, None),
        ({"train": {"device": "cuda"}}, None),
        ({"task": "nothing"}, None),
        ({"model": 5, "train": 7}, None),
    ],
)
def test_it_is_chosen_where_no_width_is_given(
    given: dict[str, Any], found: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cpu_model(given) == ({} if found is None else {"model": found})


def test_a_gpu_has_the_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = started_config({}).model
    assert (config.dim, config.depths.encoder) == (512, 18)


def write_two_files(folder: Path, count: int) -> None:
    """The page's configuration for two text files, with the vocabulary of a small text, and these files."""
    table = (ROOT / "docs/translation.md").read_text().partition("### Two files are enough")[2].partition("```toml\n")[2]
    (folder / "my.toml").write_text(f"{table.partition('```')[0]}[tokenizer]\nvocab_size = 400\n")
    sentences = list(pairs(count, seed=1, unseen=False))
    for side, language in enumerate(("en", "de")):
        (folder / f"text.{language}").write_text("".join(f"{pair[side]}\n" for pair in sentences))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, on a machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path


@pytest.mark.slow
def test_the_log_and_the_configuration_say_so(folder: Path) -> None:
    write_two_files(folder, 600)
    quick = {"batches": {"tokens": 128}, "search": {"method": "greedy", "max_length_factor": 0, "max_length_extra": 2}}
    run = kl.train("my.toml", run="run", train={"steps": 1, "valid_sentences": 4}, **quick)
    assert (run.config.model.dim, run.config.model.layers) == (128, 6)
    for name in ("log.txt", "config.toml"):
        assert "this machine trains on a CPU: dim is 128" in (folder / "run" / name).read_text().splitlines()[0]


@pytest.mark.slow
def test_two_text_files_and_the_readmes_lines_give_a_translator(folder: Path) -> None:
    write_two_files(folder, 6000)
    (lines,) = re.findall(r"```py\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(lines, names)
    assert names["run"].config.train.warmup_steps == 200
    assert names["run"].scores()["test"]["bleu"]["value"] > 50
