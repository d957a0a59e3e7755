"""The configuration of a language model run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from kilolayer.data.documents import TextConfig
from kilolayer.models.config import Shape
from kilolayer.tasks.config import Fault
from kilolayer.tasks.resume_rules import ResumeRules
from kilolayer.tasks.text_config import TextRunConfig


@dataclass(frozen=True, kw_only=True)
class CausalLMConfig(TextRunConfig):
    """Everything that a language model run is made from."""

    shape: ClassVar[Shape | None] = "decoder"
    resume: ClassVar[ResumeRules] = TextRunConfig.resume | ResumeRules(testing=("text.stride",))

    task: str = "causal_lm"
    """What is learned."""
    text: TextConfig = field(default_factory=TextConfig)
    """Running text, and how much of it is read at once."""

    def faults(self) -> Iterator[Fault]:
        full = "pad_id has no effect: a language model's batches are full"
        yield self.model.pad_id is not None, full, "model", "remove it"
        lossy = "WordPiece does not restore text exactly, as a language model's vocabulary must"
        yield self.tokenizer.kind == "wordpiece", lossy, "tokenizer", "choose another kind"
        yield from super().faults()
