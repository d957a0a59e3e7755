"""The export of an encoder of text: its tokenizer, and a pipeline that reads one text."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from kilolayer.data.vocabulary import load_vocabulary
from kilolayer.data.word_pieces import FIRST, MASK, WordPieceVocabulary
from kilolayer.huggingface.task_export import Config, TaskExport, trusted
from kilolayer.huggingface.text_tokenizer import encoder_files


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
        vocabulary = load_vocabulary(self.folder, self._tokenizer)
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


def word_files(vocabulary: WordPieceVocabulary, length: int, *, token_types: int | None, masked: bool) -> dict[str, bytes]:
    """File names and contents, for an encoder that reads `length` tokens. masked: texts may contain masks."""
    pad, unknown, start, end = FIRST
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "unk_token": unknown,
        "cls_token": start,
        "sep_token": end,
        "mask_token": MASK,
        "model_max_length": length,
        "model_input_names": [name for name in inputs if token_types or name != "token_type_ids"],
        "split_special_tokens": not masked,  # text that spells a special token is ordinary text, unless masks must be found
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": vocabulary.text().encode(), "tokenizer_config.json": json.dumps(settings, indent=1).encode()}
