"""What a masked language model adds to an exported folder."""

from __future__ import annotations

from typing import ClassVar

from kilolayer.data.word_pieces import MASK as WORD_MASK
from kilolayer.generate.fill import MASK
from kilolayer.huggingface.text_encoder_export import TextEncoderExport
from kilolayer.tasks.masked_lm.config import MaskedLMConfig


class MaskedLanguageModelExport(TextEncoderExport[MaskedLMConfig]):
    """Its tokenizer knows the mask."""

    pipeline: ClassVar[str] = "fill-mask"
    masked: ClassVar[bool] = True

    @property
    def length(self) -> int:
        """Tokens of a text."""
        return self.config.text.length

    @property
    def example(self) -> str:
        """A text with a mask, as the vocabulary writes it."""
        return f"A {WORD_MASK if self.word_pieces else MASK} text."
