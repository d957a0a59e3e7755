"""The configuration of a language model's run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kilolayer.config import Table, merge
from kilolayer.data.documents import TextConfig
from kilolayer.data.shapes import BatchConfig
from kilolayer.data.tokenizer import TokenizerConfig
from kilolayer.models.config import Shape
from kilolayer.tasks.config import Fault, RunConfig, UsualBatch
from kilolayer.tasks.text_vocabulary import exact_vocabulary, text_faults, vocabulary_faults


@dataclass(frozen=True, kw_only=True)
class CausalLMConfig(RunConfig):
    """Everything that a language model's run is made from."""

    shape: ClassVar[Shape | None] = "decoder"

    task: str = "causal_lm"
    """What is learned."""
    text: TextConfig = field(default_factory=TextConfig)
    """Running text, and how much of it is read at once."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The vocabulary."""
    batches: BatchConfig = field(default_factory=BatchConfig)
    """Tokens of a batch."""

    @classmethod
    def defaults(cls, table: Mapping[str, Any]) -> Table:
        # One table for input and output would have the decoder begin by repeating what it reads.
        own: Table = {"model": {"pad_id": "none", "tie_embeddings": False}, "train": {"label_smoothing": 0.0}}
        return merge(own, exact_vocabulary(table))

    def faults(self) -> Iterator[Fault]:
        full = "pad_id has no effect: a language model's batches are full"
        yield self.model.pad_id is not None, full, "model", "remove it"
        yield from vocabulary_faults(self.model, self.tokenizer)
        yield from text_faults(self.model, self.text, self.train, self.batches.tokens)
        changed = self.batches.shapes != BatchConfig.shapes
        yield changed, "shapes has no effect: all windows are of one length", "batches", "remove it"

    def usual_batch(self, length: int | None) -> UsualBatch:
        length = length or self.text.length
        return UsualBatch(max(1, self.batches.tokens // length), length)
