"""What a classifier adds to an exported folder."""

from __future__ import annotations

from typing import ClassVar

from kilolayer.huggingface.text_encoder_export import TextEncoderExport
from kilolayer.tasks.classify.config import ClassifyConfig


class ClassifierExport(TextEncoderExport[ClassifyConfig]):
    """Its configuration names the classes."""

    pipeline: ClassVar[str] = "text-classification"

    @property
    def length(self) -> int:
        """Tokens of an example."""
        return self.config.examples.length

    @property
    def labels(self) -> list[str]:
        return self.config.examples.classes
