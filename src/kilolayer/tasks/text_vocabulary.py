"""What the configurations of all models of running text have in common: a vocabulary that gives every text back as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kilolayer.config import Table
from kilolayer.data.documents import DocumentsConfig
from kilolayer.data.tokenizer import TokenizerConfig
from kilolayer.data.vocabulary import ByteVocabulary
from kilolayer.models.config import ModelConfig
from kilolayer.tasks.config import Fault
from kilolayer.tasks.train_config import TrainConfig


def exact_vocabulary(table: Mapping[str, Any], more: int = 0) -> Table:
    """The defaults of [model] and [tokenizer]; more: rows of the model's table that are no tokens of the vocabulary."""
    tokenizer = table.get("tokenizer", {})
    if not isinstance(tokenizer, Mapping):
        return {}
    if tokenizer.get("kind") == "bytes":
        return {"model": {"vocab_size": ByteVocabulary.vocab_size + more}}
    if tokenizer.get("path", "none") != "none":
        return {}
    size = tokenizer.get("vocab_size", TokenizerConfig.vocab_size)
    known = isinstance(size, int)
    return {"model": {"vocab_size": size + more} if known else {}, "tokenizer": {"normalization": "identity"}}


def vocabulary_faults(model: ModelConfig, tokenizer: TokenizerConfig, more: int = 0) -> Iterator[Fault]:
    """Of the tables [model] and [tokenizer]."""
    known = (ByteVocabulary.vocab_size if tokenizer.of_bytes else tokenizer.vocab_size) + more
    trained = tokenizer.path is None and not tokenizer.of_bytes
    loses = trained and (not tokenizer.byte_fallback or tokenizer.normalization != "identity")
    yield (
        tokenizer.path is None and model.vocab_size != known,
        f"vocab_size is {model.vocab_size}, and the vocabulary has {known} tokens",
        "model",
        "remove model.vocab_size",
    )
    yield not tokenizer.shared, "shared has no effect on a language model", "tokenizer", "remove it"
    yield (
        loses,
        "a language model's vocabulary must give every text back as it was",
        "tokenizer",
        "remove byte_fallback and normalization",
    )


def text_faults(model: ModelConfig, text: DocumentsConfig, train: TrainConfig, tokens: int) -> Iterator[Fault]:
    """Of the table [text]; tokens: of a batch."""
    short = model.max_length is not None and model.max_length < text.length
    unvalidated = not text.valid and not text.valid_share
    yield (
        short,
        f"the model has {model.max_length} positions, and a window {text.length} tokens",
        "text",
        "lower text.length, or raise model.max_length",
    )
    yield (
        tokens < text.length,
        f"a batch of {tokens} tokens cannot hold a window of {text.length}",
        "text",
        "raise batches.tokens, or lower text.length",
    )
    yield (
        bool(train.patience) and unvalidated,
        "patience has no effect without a validation part",
        "train",
        "set text.valid or text.valid_share",
    )
