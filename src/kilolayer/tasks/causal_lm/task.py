"""Language modelling: running text, a decoder, the loss per token, bits per byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from kilolayer.data.documents import TextParts
from kilolayer.data.frequencies import count_tokens, frequency_loss
from kilolayer.data.held_out import HeldOut
from kilolayer.data.token_text import TokenText, encode_documents
from kilolayer.data.vocabulary import TextVocabulary
from kilolayer.data.windows import Windows, windows_in_order
from kilolayer.evaluate.likelihood import TextLoss, TextScore, measure
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.continuation import continue_texts
from kilolayer.models.decoder import Decoder
from kilolayer.runtime.recorder import Recorder
from kilolayer.tasks.causal_lm.config import CausalLMConfig
from kilolayer.tasks.task import Loss
from kilolayer.tasks.text_task import TextTask
from kilolayer.tasks.token_loss import loss_of_tokens

SAMPLES, PROMPT, CONTINUATION = 5, 100, 200  # in the report: texts, prompt tokens, generated tokens


class CausalLMTask(TextTask[CausalLMConfig]):
    """The text of a run, ready for training, validation and testing."""

    def __init__(self, text: TextParts, vocabulary: TextVocabulary, cache: Path, config: CausalLMConfig) -> None:
        super().__init__(text, vocabulary, cache, config)
        self.train = encode_documents(text.train, vocabulary, cache)
        self.valid, self.test = (
            None if part is None else encode_documents(part, vocabulary, cache) for part in (text.valid, text.test)
        )
        self.training_batches(seed=0)  # raises if the text is too short

    def loss(self, model: Decoder, parts: Sequence[Tensor], *, hidden_states: bool) -> Loss:
        """Parts: tokens and, as labels, the next token of each: int64 [rows, length]."""
        tokens, labels = parts
        return loss_of_tokens(model, model(tokens, hidden_states=hidden_states), labels, self.config.train.label_smoothing)

    def model_inputs(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (parts[0],)

    def training_batches(self, seed: int) -> Windows:
        """Endless shuffled windows of the training text."""
        return Windows(self.train, self.rows, self.length, seed)

    def held_out(self) -> HeldOut:
        return HeldOut(*(None if part is None else part.digest for part in (self.valid, self.test)))

    def frequency_loss(self) -> float:
        """The frequency loss of all tokens, including the ends of documents."""
        return frequency_loss(count_tokens(self.train))

    def validate(self, model: Decoder, most: int, recorder: Recorder | None = None) -> TextLoss | None:
        """The loss of the first `most` windows of the validation set, which do not overlap; None if there is no such set.

        recorder: runs the forward pass and the loss of each batch.
        """
        if self.valid is None:
            return None
        batches = windows_in_order(self.valid, self.rows, self.length, self.length, most)
        return measure(model, batches, self.vocabulary.byte_lengths, recorder)

    def test_scores(self, model: Decoder, stride: int | None = None) -> dict[str, TextScore]:
        """The scores of the test set; stride: overrides the configured one."""
        assert self.test is not None
        config = self.config
        if stride is not None:
            config = replace(config, text=replace(config.text, stride=stride))
        return self.scores_of(model, self.test, self.vocabulary, config)

    @classmethod
    def scores_of(
        cls, model: Decoder, text: TokenText, vocabulary: TextVocabulary, config: CausalLMConfig
    ) -> dict[str, TextScore]:
        """Scores over windows that start `text.stride` tokens apart; each token is scored once."""
        length = config.text.length
        stride = config.text.stride or length
        batches = windows_in_order(text, config.rows, length, stride)
        return measure(model, batches, vocabulary.byte_lengths).scores(f"length:{length}|stride:{stride}")

    def samples(self, model: Decoder) -> list[dict[str, str]]:
        """The model's continuations at a few positions of a text that it was not trained on, if there is one."""
        text = self.test or self.valid or self.train
        width = min(PROMPT + CONTINUATION, len(text) - 1)
        prompt = -(-width * PROMPT // (PROMPT + CONTINUATION))
        positions = np.unique(np.linspace(1, len(text) - width, SAMPLES).astype(np.int64))  # fewer of a short text
        rows = text.read(positions, width).tolist()
        search = SearchConfig(method="sample", max_length_factor=0, max_length_extra=max(1, width - prompt))
        written = continue_texts(model, [row[:prompt] for row in rows], search, context=self.length)
        return [
            {
                "prompt": self._readable(row[:prompt]),
                "text": self._readable(row[prompt:]),
                "continuation": self._readable(found.tokens),
            }
            for row, (found,) in zip(rows, written, strict=True)
        ]

    def _readable(self, tokens: list[int]) -> str:
        """The text of the tokens, without partial characters at its ends."""
        return self.vocabulary.decode(tokens).strip("\ufffd")
