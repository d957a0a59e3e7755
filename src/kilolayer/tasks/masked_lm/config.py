"""The configuration of a masked language model run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from kilolayer.config import Table
from kilolayer.data.masking import MaskingConfig
from kilolayer.data.packing import EDGES
from kilolayer.errors import InputError
from kilolayer.models.config import Shape
from kilolayer.tasks.config import Fault, UsualBatch
from kilolayer.tasks.resume_rules import OTHER_BATCHES, ResumeRules
from kilolayer.tasks.text_config import TextRunConfig


@dataclass(frozen=True, kw_only=True)
class MaskedLMConfig(TextRunConfig):
    """Everything that a masked language model run is made from."""

    shape: ClassVar[Shape | None] = "encoder"
    resume: ClassVar[ResumeRules] = TextRunConfig.resume | ResumeRules(breaks={"masking": OTHER_BATCHES})
    more_rows: ClassVar[int] = 1
    """One row, for the mask token."""

    task: str = "masked_lm"
    """What is learned."""
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    """What is hidden of the text."""

    @classmethod
    def from_start(cls, tables: Table) -> Table:
        """The inherited tables; a model with a head is refused."""
        if tables["model"].get("head", "none") != "none":
            raise InputError(
                "a masked language model cannot start from a classifier: it has no token scores",
                fix="name a model that predicts tokens, such as a BertForMaskedLM",
            )
        return super().from_start(tables)

    def faults(self) -> Iterator[Fault]:
        # With a mask, the model knows which batches have no padding (most of them): attention is fastest there.
        fault = "pad_id has no effect: the batches of a masked language model carry a padding mask"
        yield self.model.pad_id is not None, fault, "model", "remove it"
        yield self.model.head is not None, "a head scores whole sequences, not masked tokens", "model", "remove head"
        yield from super().faults()
        short = f"a row of {self.text.length} tokens has no room for a token between start and end"
        yield self.text.length <= EDGES, short, "text", f"raise text.length to {EDGES + 1} or more"

    def usual_batch(self, length: int | None) -> UsualBatch:
        usual = super().usual_batch(length)
        return replace(usual, scored=self.masking.max_masked(usual.length))
