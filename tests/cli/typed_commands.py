"""What the tests of the command type, and the small corpus that they type it for."""

from __future__ import annotations

import io
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from kilolayer.data.grammar import pairs
from tests.fixtures.commands import typed
from tests.fixtures.undrawn_charts import drawn_charts

CONFIG = """\
[model]
layers = 2
dim = 16
heads = 2
ffn_dim = 32
dropout = 0.1

[data]
folder = "{corpus}"
directions = ["en-de"]
valid = "valid"
test = "test"

[tokenizer]
vocab_size = 90
byte_fallback = false
character_coverage = 1.0

[batches]
tokens = 400
shapes = 3

[train]
steps = 6
lr = 1e-2
warmup_steps = 3
log_every = 2
layers_every = 3
valid_every = 3
valid_bleu = true
save_every = 3
device = "cpu"

[search]
method = "greedy"
max_length_factor = 1.0
max_length_extra = 4
"""


def write_corpus(folder: Path) -> Path:
    """A configuration file beside its text: English, German, and English in capitals as a third language."""
    sentences = [(*pair, pair[0].upper()) for pair in pairs(240, seed=1, unseen=False)]
    for part, chosen in {"train": sentences[:200], "valid": sentences[200:220], "test": sentences[220:230]}.items():
        for side, language in enumerate(("en", "de", "up")):
            (folder / f"{part}.{language}").write_text("".join(f"{row[side]}\n" for row in chosen), encoding="utf-8")
    (folder / "small.toml").write_text(CONFIG.format(corpus=folder), encoding="utf-8")
    return folder / "small.toml"


def quietly(*words: object, draws: bool = False) -> tuple[int, str, str]:
    """Exit code, standard output and error of a command. draws: whether the charts of its page are drawn."""
    with drawn_charts() if draws else nullcontext():
        return typed(*words)


def refused(*words: object) -> list[str]:
    """What is said, in three lines: what, where, what to do."""
    code, out, err = quietly(*words)
    lines = err.splitlines()
    assert code == 2, err
    assert out == ""
    assert lines[0].startswith("kilolayer: ")
    assert len(lines) == 3, err
    return lines


def translate(monkeypatch: pytest.MonkeyPatch, data: bytes, *words: object) -> tuple[int, list[str], str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    code, out, err = quietly("translate", *words)
    return code, out.split("\n")[:-1], err
