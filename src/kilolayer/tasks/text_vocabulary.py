"""Vocabulary defaults and checks for models of text, whose vocabulary must be able to reproduce every text exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kilolayer.config import Table
from kilolayer.data.tokenizer import DEFAULT_SIZE, TokenizerConfig
from kilolayer.data.vocabulary import ByteVocabulary
from kilolayer.models.config import ModelConfig
from kilolayer.tasks.config import Fault


def size_of(tokenizer: Mapping[str, Any]) -> Any:
    """The number of tokens that a table [tokenizer] asks for."""
    size = tokenizer.get("vocab_size")
    return DEFAULT_SIZE if size in (None, "none") else size


def exact_vocabulary(table: Mapping[str, Any], more: int = 0) -> Table:
    """The defaults of [model] and [tokenizer]; more: rows of the model's table in addition to the vocabulary's tokens."""
    tokenizer = table.get("tokenizer", {})
    if not isinstance(tokenizer, Mapping):
        return {}
    if tokenizer.get("kind") == "bytes":
        return {"model": {"vocab_size": ByteVocabulary.vocab_size + more}}
    if tokenizer.get("path", "none") != "none":
        return {}
    size = size_of(tokenizer)
    known = isinstance(size, int)
    return {"model": {"vocab_size": size + more} if known else {}, "tokenizer": {"normalization": "identity"}}


def vocabulary_faults(model: ModelConfig, tokenizer: TokenizerConfig, more: int = 0) -> Iterator[Fault]:
    """Yield the possible faults of the tables [model] and [tokenizer]."""
    known = (ByteVocabulary.vocab_size if tokenizer.of_bytes else tokenizer.size) + more
    trained = tokenizer.path is None and not tokenizer.of_bytes
    loses = trained and (not tokenizer.byte_fallback or tokenizer.normalization != "identity")
    yield (
        tokenizer.path is None and model.vocab_size != known,
        f"vocab_size is {model.vocab_size}, but the vocabulary has {known} tokens",
        "model",
        "remove model.vocab_size",
    )
    yield not tokenizer.shared, "shared has no effect on a language model", "tokenizer", "remove it"
    yield (
        loses,
        "the vocabulary of this task must give every text back as it was",
        "tokenizer",
        "remove byte_fallback and normalization",
    )
