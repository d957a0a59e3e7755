"""What an image classifier adds to an exported folder."""

from __future__ import annotations

from typing import ClassVar

from kilolayer.huggingface.task_export import TaskExport
from kilolayer.tasks.classify_image.config import ClassifyImageConfig


class ImageClassifierExport(TaskExport[ClassifyImageConfig]):
    """Its configuration names the classes."""

    pipeline: ClassVar[str] = "image-classification"

    @property
    def labels(self) -> list[str]:
        return self.config.images.classes

    def transformers_use(self, folder: str, architecture: str, trust: bool) -> str:
        return (
            "from transformers import pipeline\n\n"
            f'classify = pipeline("{self.pipeline}", model="{folder}")\n'
            'print(classify("image.png"))'
        )
