"""Masked language modelling: running text, an encoder, the loss and accuracy of masked tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from kilolayer.data.documents import TextParts
from kilolayer.data.frequencies import count_tokens, frequency_loss
from kilolayer.data.held_out import HeldOut
from kilolayer.data.masking import MaskedText, Masker, fixed_masks, inputs_of
from kilolayer.data.packing import Documents, FixedRows, PackedText
from kilolayer.data.token_text import TokenText, encode_documents
from kilolayer.data.tokenizer import END, PAD, START
from kilolayer.data.vocabulary import TextVocabulary
from kilolayer.evaluate.likelihood import TextScore
from kilolayer.evaluate.masked_likelihood import MaskedLoss, measure_masked
from kilolayer.generate.fill import decode_with_masks
from kilolayer.layers.modules import in_mode
from kilolayer.models.encoder import Encoder
from kilolayer.runtime.recorder import Recorder
from kilolayer.tasks.masked_lm.config import MaskedLMConfig
from kilolayer.tasks.task import Loss
from kilolayer.tasks.text_task import TextTask
from kilolayer.tasks.token_loss import loss_of_tokens

SAMPLES, SHOWN = 5, 100  # in the report: texts, and tokens of each


class MaskedLMTask(TextTask[MaskedLMConfig]):
    """The text of a run, ready for training, validation and testing."""

    def __init__(self, text: TextParts, vocabulary: TextVocabulary, cache: Path, config: MaskedLMConfig) -> None:
        super().__init__(text, vocabulary, cache, config)
        self.masker = Masker(config.masking, self.length, vocabulary.vocab_size)
        self.train = Documents(encode_documents(text.train, vocabulary, cache))
        self.valid, self.test = (
            None if part is None else FixedRows(Documents(encode_documents(part, vocabulary, cache)), self.length)
            for part in (text.valid, text.test)
        )

    def training_batches(self, seed: int) -> MaskedText:
        """Endless shuffled rows of the training text, with new masks in each epoch."""
        return MaskedText(PackedText(self.train, self.rows, self.length, seed), self.masker)

    def loss(self, model: Encoder, parts: Sequence[Tensor], *, hidden_states: bool) -> Loss:
        """The loss of the masked tokens; parts: those of a `MaskedBatch`."""
        return masked_loss(model, parts, hidden_states=hidden_states, smoothing=self.config.train.label_smoothing)

    def model_inputs(self, parts: Sequence[Tensor]) -> dict[str, Tensor]:
        inputs, _ = inputs_of(parts)
        filled = inputs["mask"].any(dim=1) if "mask" in inputs else slice(None)
        return {name: each[filled] for name, each in inputs.items()}

    def held_out(self) -> HeldOut:
        return HeldOut(*(None if part is None else part.documents.text.digest for part in (self.valid, self.test)))

    def frequency_loss(self) -> float:
        """The frequency loss of the tokens of documents, any of which may be masked."""
        counts = count_tokens(self.train.text)
        counts[END] = 0
        return frequency_loss(counts)

    def validate(self, model: Encoder, most: int, recorder: Recorder | None = None) -> MaskedLoss | None:
        """The loss and accuracy on the first `most` rows of the validation set, with fixed masks; None if there is no such set.

        recorder: runs the forward pass and the loss of each batch.
        """
        if self.valid is None:
            return None
        return measure_masked(model, fixed_masks(self.valid, self.masker, self.rows, most), recorder)

    def test_scores(self, model: Encoder) -> dict[str, TextScore]:
        """The scores of the test set, with fixed masks."""
        assert self.test is not None
        return _row_scores(model, self.test, self.masker, self.config)

    @classmethod
    def scores_of(
        cls, model: Encoder, text: TokenText, vocabulary: TextVocabulary, config: MaskedLMConfig
    ) -> dict[str, TextScore]:
        """The scores of a text's rows, with fixed masks."""
        masker = Masker(config.masking, config.text.length, vocabulary.vocab_size)
        return _row_scores(model, FixedRows(Documents(text), config.text.length), masker, config)

    @torch.inference_mode()
    def samples(self, model: Encoder) -> list[dict[str, str]]:
        """The model's predictions at a few positions of a text that it was not trained on, if there is one."""
        rows = self.test or self.valid or FixedRows(self.train, self.length)
        (batch,) = fixed_masks(rows, self.masker, SAMPLES, SAMPLES)
        device = next(model.parameters()).device
        inputs, _ = inputs_of([part.to(device) for part in batch.parts])
        with in_mode(model, training=False):
            logits = model(**inputs).logits
        assert logits is not None
        best = logits[..., END + 1 : self.vocabulary.vocab_size].argmax(dim=-1).cpu() + END + 1
        hidden = batch.labels != PAD
        at = torch.arange(len(hidden))[:, None].expand_as(hidden)[hidden], batch.positions[hidden]
        texts = {name: batch.packed.tokens.clone() for name in ("masked", "text", "filled")}
        for name, tokens in (("masked", self.masker.mask), ("text", batch.labels[hidden]), ("filled", best[hidden])):
            texts[name][at] = tokens
        return [
            {name: self._readable(each[row].tolist(), position) for name, each in texts.items()}
            for row, position in enumerate(batch.positions[:, 0].tolist())
        ]

    def _readable(self, tokens: list[int], position: int) -> str:
        """The text around a position, within its document and without partial characters at the ends."""
        first, last = (max(1, position - SHOWN // 2), min(len(tokens), position + SHOWN // 2))
        before, after = tokens[first:position], tokens[position:last]
        before = before[len(before) - before[::-1].index(START) :] if START in before else before
        after = after[: after.index(END)] if END in after else after
        return decode_with_masks(before + after, self.vocabulary).strip("\ufffd")


def _row_scores(model: Encoder, rows: FixedRows, masker: Masker, config: MaskedLMConfig) -> dict[str, TextScore]:
    masking = "|".join(f"{name}:{value:g}" for name, value in asdict(config.masking).items())
    found = measure_masked(model, fixed_masks(rows, masker, config.rows))
    return found.scores(f"{masking}|length:{config.text.length}")


def masked_loss(model: Encoder, parts: Sequence[Tensor], *, hidden_states: bool, smoothing: float) -> Loss:
    """The loss of the masked tokens of a `MaskedBatch`, given its parts."""
    inputs, labels = inputs_of(parts)
    return loss_of_tokens(model, model(**inputs, hidden_states=hidden_states), labels, smoothing)
