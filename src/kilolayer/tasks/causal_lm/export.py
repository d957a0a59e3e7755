"""What a language model adds to an exported folder."""

from __future__ import annotations

from typing import Any, ClassVar

from kilolayer.data.vocabulary import load_vocabulary
from kilolayer.huggingface.task_export import LEAST_POSITIONS, TaskExport, trusted
from kilolayer.huggingface.text_tokenizer import text_files
from kilolayer.tasks.causal_lm.config import CausalLMConfig


class LanguageModelExport(TaskExport[CausalLMConfig]):
    """Its tokenizer pads on the left, and it samples as `kilolayer generate` does."""

    pipeline: ClassVar[str] = "text-generation"

    @property
    def positions(self) -> int:
        return max(self.config.text.length, LEAST_POSITIONS)

    def tokenizer_files(self, left_out: int = 0) -> dict[str, bytes]:
        vocabulary = load_vocabulary(self.folder, self.config.tokenizer)
        return text_files(vocabulary, self.config.text.length, left_out)

    def generation(self, positions: int) -> dict[str, Any]:
        # A pipeline of Transformers takes 0.7 if there is no temperature. Positions beyond the window length are not learned.
        return {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_length": self.config.text.length}

    def transformers_use(self, folder: str, architecture: str, trust: bool) -> str:
        return (
            "from transformers import pipeline\n\n"
            f'write = pipeline("{self.pipeline}", "{folder}"{trusted(trust)})\n'
            'print(write("A text that goes on")[0]["generated_text"])'
        )
