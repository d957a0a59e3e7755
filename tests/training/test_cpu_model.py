"""The default model of a run on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.data.grammar import pairs
from kilolayer.training.cpu_model import cpu_model
from kilolayer.training.start import started_config

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


@pytest.fixture
def two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's configuration for two text files, and these files, in the working folder."""
    page = (Path(__file__).parents[2] / "docs/translation.md").read_text()
    (tmp_path / "my.toml").write_text(
        page.partition("### Two files are enough")[2].partition("```toml\n")[2].partition("```")[0]
    )
    sentences = list(pairs(600, seed=1, unseen=False))
    for side, language in enumerate(("en", "de")):
        (tmp_path / f"text.{language}").write_text("".join(f"{pair[side]}\n" for pair in sentences))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path


SMALL_TEXT: dict[str, Any] = {"tokenizer": {"vocab_size": 400}}  # the grammar has few words


def test_the_log_and_the_configuration_say_so(two_files: Path) -> None:
    quick = {"batches": {"tokens": 128}, "search": {"method": "greedy", "max_length_factor": 0, "max_length_extra": 2}}
    run = kl.train("my.toml", run="run", train={"steps": 1, "valid_sentences": 4}, **quick, **SMALL_TEXT)
    assert (run.config.model.dim, run.config.model.layers) == (128, 6)
    for name in ("log.txt", "config.toml"):
        assert "this machine trains on a CPU: dim is 128" in (two_files / "run" / name).read_text().splitlines()[0]
