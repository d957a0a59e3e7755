"""The configuration that all tasks on running text share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kilolayer.config import Table, merge
from kilolayer.data.documents import DocumentsConfig
from kilolayer.data.shapes import BatchConfig
from kilolayer.data.tokenizer import TokenizerConfig
from kilolayer.tasks.config import Fault, RunConfig, UsualBatch
from kilolayer.tasks.resume_rules import OTHER_BATCHES, OTHER_TOKENS, ResumeRules
from kilolayer.tasks.text_vocabulary import exact_vocabulary, vocabulary_faults


@dataclass(frozen=True, kw_only=True)
class TextRunConfig(RunConfig):
    """Running text, its vocabulary, and batches of rows of equal length."""

    resume: ClassVar[ResumeRules] = ResumeRules(
        files=("text.train", "text.valid", "text.test"),
        breaks={"tokenizer": OTHER_TOKENS, "text": OTHER_BATCHES, "batches": OTHER_BATCHES},
    )
    more_rows: ClassVar[int] = 0
    """Rows of the model's embedding table in addition to the vocabulary's tokens."""

    text: DocumentsConfig = field(default_factory=DocumentsConfig)
    """Running text, and how much of it is read at once."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The vocabulary."""
    batches: BatchConfig = field(default_factory=BatchConfig)
    """Tokens of a batch."""

    @classmethod
    def defaults(cls, table: Mapping[str, Any]) -> Table:
        own: Table = {"model": {"pad_id": "none"}, "train": {"label_smoothing": 0.0}}
        return merge(own, exact_vocabulary(table, cls.more_rows))

    def faults(self) -> Iterator[Fault]:
        model, text, tokens = self.model, self.text, self.batches.tokens
        yield from vocabulary_faults(model, self.tokenizer, self.more_rows)
        yield (
            model.max_length is not None and model.max_length < text.length,
            f"the model has {model.max_length} positions, but a window has {text.length} tokens",
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
            bool(self.train.patience) and not text.valid and not text.valid_share,
            "patience has no effect without a validation set",
            "train",
            "set text.valid or text.valid_share",
        )
        changed = self.batches.shapes != BatchConfig.shapes
        yield changed, "shapes has no effect: all rows are of one length", "batches", "remove it"

    @property
    def rows(self) -> int:
        """The number of windows in a batch."""
        return max(1, self.batches.tokens // self.text.length)

    def usual_batch(self, length: int | None) -> UsualBatch:
        length = length or self.text.length
        return UsualBatch(max(1, self.batches.tokens // length), length)
