"""Every form of a run that is attacked: a task that comes later is attacked by being added here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fixtures.small_classifiers import classify_table
from tests.fixtures.small_runs import masked_table, table, text_table

Table = dict[str, Any]


@dataclass(frozen=True)
class Form:
    """config: the configuration of a small run on a corpus, tables laid over it. verb: the words that use a run of it, RUN in
    the place of its folder; typed: what is typed to it on standard input. results: the files that its test part leaves.
    line: how a line of any text is typed to it."""

    config: Callable[..., Table]
    verb: tuple[str, ...]
    typed: bytes
    results: tuple[str, ...]
    options: dict[str, Table] = field(default_factory=dict)
    line: Callable[[str], str] = str

    def table(self, corpus: Path, **sections: Table) -> Table:
        """The configuration, with `sections` laid over it."""
        merged = {name: {**self.options.get(name, {}), **sections.get(name, {})} for name in {**self.options, **sections}}
        return self.config(corpus, **merged)


TRANSLATE = ("translate", "RUN"), b"the dog sees a cat\n", ("scores.json", "samples.json", "test.en-de.txt")
GENERATE = ("generate", "RUN", "--max-tokens", "8"), b"the dog\n", ("scores.json", "samples.json")
FILL = ("fill", "RUN"), b"the <mask> sees a cat\n", ("scores.json", "samples.json")
PREDICT = ("predict", "RUN"), b"we go to sea\n", ("scores.json", "samples.json")
FORMS: dict[str, Form] = {
    "translation": Form(table, *TRANSLATE, {"train": {"valid_bleu": True}}),
    "translation with experts": Form(table, *TRANSLATE, {"model": {"moe": {"experts": 4}}}),
    "translation, averaged": Form(table, *TRANSLATE, {"train": {"average": 2, "keep": 2}}),
    "language model of bytes": Form(text_table, *GENERATE),
    "language model of pieces": Form(text_table, *GENERATE, {"tokenizer": {"kind": "bpe", "vocab_size": 330}}),
    "language model of byte-level BPE": Form(text_table, *GENERATE, {"tokenizer": {"kind": "byte_bpe", "vocab_size": 330}}),
    "masked language model": Form(masked_table, *FILL, line=lambda text: f"{text[:8]}<mask>"),
    "classifier": Form(classify_table, *PREDICT, line=lambda text: f"a {text}".replace("\t", " ")),
}
QUICK = ("translation", "language model of bytes")
"""Those that every attack of the quick tests meets; the others meet it in the slow ones."""


def assert_same(run: Path, undisturbed: Path, form: str) -> None:
    """What the test part of a run leaves is that of an undisturbed one."""
    for name in FORMS[form].results:
        assert (run / name).read_bytes() == (undisturbed / name).read_bytes(), name
