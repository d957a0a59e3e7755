"""The export of an encoder of text: its tokenizer, and a pipeline that reads one text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from kilolayer.data.vocabulary import load_vocabulary
from kilolayer.data.word_pieces import WordPieceVocabulary
from kilolayer.exporting.task_export import Config, TaskExport, trusted
from kilolayer.exporting.text_tokenizer import encoder_files
from kilolayer.exporting.word_tokenizer import word_files


class TextEncoderExport(TaskExport[Config], ABC):
    """For a task whose configuration has a table [tokenizer]. masked: whether its texts contain masks."""

    masked: ClassVar[bool] = False

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens of a text."""

    @property
    def example(self) -> str:
        """The text of the example."""
        return "A text."

    @property
    def word_pieces(self) -> bool:
        return self._tokenizer.kind == "wordpiece"

    def tokenizer_files(self, left_out: int = 0) -> dict[str, bytes]:
        vocabulary = load_vocabulary(self.run.folder, self._tokenizer)
        options: Any = {"token_types": self.config.model.token_types, "masked": self.masked}
        if isinstance(vocabulary, WordPieceVocabulary):
            return word_files(vocabulary, self.length, **options)
        return encoder_files(vocabulary, self.length, **options)

    def transformers_use(self, folder: str, architecture: str, trust: bool) -> str:
        call = f'pipeline("{self.pipeline}", "{folder}"{trusted(trust)})("{self.example}")'
        return f"from transformers import pipeline\n\nprint({call})"

    @property
    def _tokenizer(self) -> Any:
        return self.config.tokenizer  # pyright: ignore[reportAttributeAccessIssue]
