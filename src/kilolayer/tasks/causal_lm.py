"""Language modelling: running text, a decoder, the loss a token, bits per byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from kilolayer.data.documents import TextConfig, TextParts, find_text
from kilolayer.data.shapes import BatchConfig
from kilolayer.data.token_text import TokenText, encode_documents
from kilolayer.data.tokenizer import TokenizerConfig
from kilolayer.data.vocabulary import TextVocabulary, vocabulary_for
from kilolayer.data.windows import Windows, windows_in_order
from kilolayer.evaluate.likelihood import TextLoss, TextScore, measure
from kilolayer.files.paths import storable
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.continuation import continue_texts
from kilolayer.models.config import ModelConfig
from kilolayer.models.decoder import Decoder
from kilolayer.speed.recorder import Recorder
from kilolayer.tasks.results import write_results

SAMPLES, PROMPT, CONTINUATION = 5, 100, 200  # of the report: texts, tokens before, tokens written


def _absolute(config: TextConfig) -> TextConfig:
    """With absolute paths, that a run can keep."""
    names = ("train", "valid", "test")
    return replace(config, **{name: [str(storable(Path(path))) for path in getattr(config, name)] for name in names})


class CausalLMTask:
    """The text of a run, ready to train, to validate and to test on."""

    def __init__(
        self, text: TextParts, vocabulary: TextVocabulary, cache: Path, config: TextConfig, batches: BatchConfig
    ) -> None:
        self.vocabulary, self.config = vocabulary, config
        self.rows = max(1, batches.tokens // config.length)
        self.train = encode_documents(text.train, vocabulary, cache)
        self.valid, self.test = (
            None if part is None else encode_documents(part, vocabulary, cache) for part in (text.valid, text.test)
        )
        self.training_batches(seed=0)  # refuses a text that is too short

    @classmethod
    def prepare(
        cls,
        config: TextConfig,
        tokenizer: TokenizerConfig,
        batches: BatchConfig,
        cache: Path,
        vocabulary: TextVocabulary | None = None,
    ) -> CausalLMTask:
        """Find the text, train the vocabulary unless a run has its own, and encode all parts: what is wrong shows now."""
        config = _absolute(config)
        text = find_text(config, cache)
        return cls(text, vocabulary or vocabulary_for(text.train, tokenizer, cache), cache, config, batches)

    def fit(self, model: ModelConfig) -> ModelConfig:
        """The model's configuration with the size of the vocabulary."""
        return replace(model, vocab_size=self.vocabulary.vocab_size)

    def resolve(self) -> dict[str, Any]:
        """The text's configuration with nothing implicit left: absolute paths."""
        return {"text": _absolute(self.config)}

    def training_batches(self, seed: int) -> Windows:
        """Endless shuffled windows of the training text."""
        return Windows(self.train, self.rows, self.config.length, seed)

    def validate(self, model: Decoder, most: int, recorder: Recorder | None = None) -> TextLoss | None:
        """The loss of the first `most` windows of the validation part, which do not overlap; None where there is none.

        recorder: runs the forward and the loss of each batch.
        """
        return None if self.valid is None else self._measure(model, self.valid, self.config.length, most, recorder)

    def test_scores(self, model: Decoder, stride: int | None = None) -> dict[str, TextScore]:
        """The scores of the test part; stride: in the place of the configured one."""
        assert self.test is not None
        stride = stride or self.config.stride or self.config.length
        return self._measure(model, self.test, stride).scores(f"length:{self.config.length}|stride:{stride}")

    def score(self, model: Decoder, folder: Path, weights: Mapping[str, Any] | None = None) -> None:
        """Leave the scores of the test part and samples of what the model writes in a run's folder."""
        tested = {} if self.test is None else {"test": self.test_scores(model)}
        scores = {part: {key: asdict(score) for key, score in found.items()} for part, found in tested.items()}
        write_results(folder, self._samples(model), scores, weights)

    def _measure(
        self, model: Decoder, text: TokenText, stride: int, most: int | None = None, recorder: Recorder | None = None
    ) -> TextLoss:
        batches = windows_in_order(text, self.rows, self.config.length, stride, most)
        return measure(model, batches, self.vocabulary.byte_lengths, recorder)

    def _samples(self, model: Decoder) -> list[dict[str, str]]:
        """How the model goes on at a few places of a text that it was not trained on, where there is one."""
        text = self.test or self.valid or self.train
        width = min(PROMPT + CONTINUATION, len(text) - 1)
        prompt = -(-width * PROMPT // (PROMPT + CONTINUATION))
        places = np.linspace(1, len(text) - width, SAMPLES).astype(np.int64)
        rows = text.read(places, width).tolist()
        search = SearchConfig(method="sample", max_length_factor=0, max_length_extra=max(1, width - prompt))
        written = continue_texts(model, [row[:prompt] for row in rows], search, context=self.config.length)
        return [
            {
                "prompt": self._readable(row[:prompt]),
                "text": self._readable(row[prompt:]),
                "continuation": self._readable(found.tokens),
            }
            for row, (found,) in zip(rows, written, strict=True)
        ]

    def _readable(self, tokens: list[int]) -> str:
        """Their text, without the halves of characters at its edges."""
        return self.vocabulary.decode(tokens).strip("\ufffd")
