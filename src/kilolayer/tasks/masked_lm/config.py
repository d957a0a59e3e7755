"""The configuration of a masked language model's run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kilolayer.config import Table, merge
from kilolayer.data.documents import DocumentsConfig
from kilolayer.data.masking import MaskingConfig
from kilolayer.data.packing import EDGES
from kilolayer.data.shapes import BatchConfig
from kilolayer.data.tokenizer import TokenizerConfig
from kilolayer.models.config import Shape
from kilolayer.tasks.config import Fault, RunConfig, UsualBatch
from kilolayer.tasks.text_vocabulary import exact_vocabulary, text_faults, vocabulary_faults

MASK_ROWS = 1
"""Rows of the model's table that are no tokens of the vocabulary: the mask."""


@dataclass(frozen=True, kw_only=True)
class MaskedLMConfig(RunConfig):
    """Everything that a masked language model's run is made from."""

    shape: ClassVar[Shape | None] = "encoder"

    task: str = "masked_lm"
    """What is learned."""
    text: DocumentsConfig = field(default_factory=DocumentsConfig)
    """Running text, and how much of it is read at once."""
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    """What is hidden of it."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The vocabulary."""
    batches: BatchConfig = field(default_factory=BatchConfig)
    """Tokens of a batch."""

    @classmethod
    def defaults(cls, table: Mapping[str, Any]) -> Table:
        # Batches tell their padding themselves: most have none, and attention is quickest where the model knows it.
        own: Table = {"model": {"pad_id": "none"}, "train": {"label_smoothing": 0.0}}
        return merge(own, exact_vocabulary(table, more=MASK_ROWS))

    def faults(self) -> Iterator[Fault]:
        told = "pad_id has no effect: the batches of a masked language model tell their padding"
        yield self.model.pad_id is not None, told, "model", "remove it"
        yield from vocabulary_faults(self.model, self.tokenizer, more=MASK_ROWS)
        yield from text_faults(self.model, self.text, self.train, self.batches.tokens)
        short = f"a row of {self.text.length} tokens has no room for one between start and end"
        yield self.text.length <= EDGES, short, "text", f"raise text.length to {EDGES + 1} or more"
        changed = self.batches.shapes != BatchConfig.shapes
        yield changed, "shapes has no effect: all rows are of one length", "batches", "remove it"

    def usual_batch(self, length: int | None) -> UsualBatch:
        length = length or self.text.length
        return UsualBatch(max(1, self.batches.tokens // length), length, scored=self.masking.most(length))
