"""Masked language modelling: running text, an encoder, the loss and accuracy of hidden tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kilolayer.data.documents import TextParts, absolute, find_text
from kilolayer.data.masking import MaskedText, Masker, fixed_masks, inputs_of
from kilolayer.data.packing import Documents, FixedRows, PackedText
from kilolayer.data.token_text import encode_documents
from kilolayer.data.tokenizer import END, PAD, START
from kilolayer.data.vocabulary import TextVocabulary, load_vocabulary, vocabulary_for
from kilolayer.evaluate.likelihood import TextScore
from kilolayer.evaluate.masked_likelihood import MaskedLoss, measure_masked
from kilolayer.generate.fill import spell
from kilolayer.layers.modules import in_mode
from kilolayer.models.encoder import Encoder
from kilolayer.speed.recorder import Recorder
from kilolayer.tasks.masked_lm.config import MASK_ROWS, MaskedLMConfig
from kilolayer.tasks.results import write_results
from kilolayer.tasks.task import Loss, Task
from kilolayer.tasks.token_loss import token_losses

SAMPLES, SHOWN = 5, 100  # of the report: texts, and tokens of each


class MaskedLMTask(Task[MaskedLMConfig]):
    """The text of a run, ready to train, to validate and to test on."""

    def __init__(self, text: TextParts, vocabulary: TextVocabulary, cache: Path, config: MaskedLMConfig) -> None:
        self._vocabulary, self.config, self.length = vocabulary, config, config.text.length
        self.rows = max(1, config.batches.tokens // self.length)
        self.masker = Masker(config.masking, self.length, vocabulary.vocab_size)
        self.train = Documents(encode_documents(text.train, vocabulary, cache))
        self.valid, self.test = (
            None if part is None else FixedRows(Documents(encode_documents(part, vocabulary, cache)), self.length)
            for part in (text.valid, text.test)
        )

    @classmethod
    def prepare(cls, config: MaskedLMConfig, cache: Path, vocabulary: TextVocabulary | None = None) -> MaskedLMTask:
        config = replace(config, text=absolute(config.text))
        text = find_text(config.text, cache)
        return cls(text, vocabulary or vocabulary_for(text.train, config.tokenizer, cache), cache, config)

    @classmethod
    def load_vocabulary(cls, config: MaskedLMConfig, folder: Path) -> TextVocabulary:
        return load_vocabulary(folder, config.tokenizer)

    @property
    def vocabulary(self) -> TextVocabulary:
        return self._vocabulary

    def resolve(self, config: MaskedLMConfig) -> MaskedLMConfig:
        """With the size of the vocabulary and the mask, and absolute paths."""
        model = replace(config.model, vocab_size=self.vocabulary.vocab_size + MASK_ROWS)
        return replace(config, model=model, text=absolute(config.text))

    def training_batches(self, seed: int) -> MaskedText:
        """Endless shuffled rows of the training text, masked anew in each epoch."""
        return MaskedText(PackedText(self.train, self.rows, self.length, seed), self.masker)

    def loss(self, model: Encoder, parts: Sequence[Tensor], *, hidden_states: bool) -> Loss:
        """Of the hidden tokens alone; parts: those of a `MaskedBatch`."""
        return masked_loss(model, parts, hidden_states=hidden_states, smoothing=self.config.train.label_smoothing)

    def model_inputs(self, parts: Sequence[Tensor]) -> dict[str, Tensor]:
        inputs, _ = inputs_of(parts)
        filled = inputs["mask"].any(dim=1) if "mask" in inputs else slice(None)
        return {name: each[filled] for name, each in inputs.items()}

    def validate(self, model: Encoder, most: int, recorder: Recorder | None = None) -> MaskedLoss | None:
        """The loss and accuracy of the first `most` rows of the validation part, whose masks never change; None without one.

        recorder: runs the forward and the loss of each batch.
        """
        return None if self.valid is None else self._measure(model, self.valid, most, recorder)

    def test_scores(self, model: Encoder) -> dict[str, TextScore]:
        """The scores of the test part, whose masks never change."""
        assert self.test is not None
        masking = "|".join(f"{name}:{value:g}" for name, value in asdict(self.config.masking).items())
        return self._measure(model, self.test).scores(f"{masking}|length:{self.length}")

    def score(self, model: Encoder, folder: Path, weights: Mapping[str, Any] | None = None) -> None:
        """Leave the scores of the test part and samples of what the model fills in in a run's folder."""
        tested = {} if self.test is None else {"test": self.test_scores(model)}
        scores = {part: {key: asdict(score) for key, score in found.items()} for part, found in tested.items()}
        write_results(folder, self._samples(model), scores, weights)

    def _measure(
        self, model: Encoder, rows: FixedRows, most: int | None = None, recorder: Recorder | None = None
    ) -> MaskedLoss:
        return measure_masked(model, fixed_masks(rows, self.masker, self.rows, most), recorder)

    @torch.inference_mode()
    def _samples(self, model: Encoder) -> list[dict[str, str]]:
        """What the model fills in at a few places of a text that it was not trained on, where there is one."""
        rows = self.test or self.valid or FixedRows(self.train, self.length)
        (batch,) = fixed_masks(rows, self.masker, SAMPLES, SAMPLES)
        device = next(model.parameters()).device
        inputs, _ = inputs_of([part.to(device) for part in batch.parts])
        with in_mode(model, training=False):
            logits = model(**inputs).logits
        assert logits is not None
        best = logits[..., END + 1 : self.vocabulary.vocab_size].argmax(dim=-1).cpu() + END + 1
        hidden = batch.labels != PAD
        at = torch.arange(len(hidden))[:, None].expand_as(hidden)[hidden], batch.places[hidden]
        texts = {name: batch.packed.tokens.clone() for name in ("masked", "text", "filled")}
        for name, tokens in (("masked", self.masker.mask), ("text", batch.labels[hidden]), ("filled", best[hidden])):
            texts[name][at] = tokens
        return [
            {name: self._readable(each[row].tolist(), place) for name, each in texts.items()}
            for row, place in enumerate(batch.places[:, 0].tolist())
        ]

    def _readable(self, tokens: list[int], place: int) -> str:
        """The tokens around a place, of its document alone, without halves of characters at the edges."""
        first, last = (max(1, place - SHOWN // 2), min(len(tokens), place + SHOWN // 2))
        before, after = tokens[first:place], tokens[place:last]
        before = before[len(before) - before[::-1].index(START) :] if START in before else before
        after = after[: after.index(END)] if END in after else after
        return spell(before + after, self.vocabulary).strip("\ufffd")


def masked_loss(model: Encoder, parts: Sequence[Tensor], *, hidden_states: bool, smoothing: float) -> Loss:
    """The loss of the hidden tokens of a `MaskedBatch`, by its parts."""
    inputs, labels = inputs_of(parts)
    output = model(**inputs, hidden_states=hidden_states)
    assert output.logits is not None
    total, nll = token_losses(output.logits, labels, smoothing)
    return Loss(total, nll, (labels != PAD).sum(), output)
