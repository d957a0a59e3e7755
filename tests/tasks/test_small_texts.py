"""A text that is too small for the default vocabulary is trained on with a smaller one; a size that was given is kept."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import kilolayer as kl
from kilolayer.errors import OptionError
from kilolayer.tasks import registry
from tests.fixtures.small_runs import SMALL

ONE_STEP = {"steps": 1, "warmup_steps": 0}
OF_TEXT = [task for task in SMALL if "tokenizer" in {field.name for field in fields(registry.get(task).load_config())}]


def without_size(task: str, corpus: Path, **tokenizer: Any) -> dict[str, Any]:
    table = SMALL[task](corpus, train=ONE_STEP)
    table["tokenizer"] = tokenizer
    table["model"].pop("vocab_size", None)
    return table


@pytest.mark.matrix(4)
@pytest.mark.parametrize("kind", ["unigram", "bpe", "byte_bpe"])
@pytest.mark.parametrize("task", OF_TEXT)
def test_a_small_text_gets_the_vocabulary_that_it_can_give(task: str, kind: str, corpus: Path, tmp_path: Path) -> None:
    if task == "translation" and kind == "byte_bpe":
        pytest.skip("a translator cannot use it")
    run = kl.train(without_size(task, corpus, kind=kind), run=tmp_path / "run")
    size = run.config.tokenizer.vocab_size  # pyright: ignore[reportAttributeAccessIssue]
    assert 100 < size < 8000
    assert run.config.model.vocab_size in (size, size + 1)  # one more for a mask
    for name in ("log.txt", "config.toml"):
        assert f"too few words for 8,000: it is {size:,}" in (run.folder / name).read_text()
    kl.train(resume=run.folder, train={"steps": 2})


@pytest.mark.matrix(2)
@pytest.mark.parametrize("task", OF_TEXT)
def test_a_size_that_is_given_is_not_changed(task: str, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="a vocabulary of 8000 pieces cannot be made from this text"):
        kl.train(without_size(task, corpus, vocab_size=8000), run=tmp_path / "run")
