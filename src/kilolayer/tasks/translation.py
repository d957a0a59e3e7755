"""Translation: text in two languages, an encoder-decoder, the loss a token, BLEU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.data.batches import BatchConfig, Batches, in_order
from kilolayer.data.corpora import Corpora, DataConfig, find_corpora
from kilolayer.data.encode import encode_text, encode_training
from kilolayer.data.filters import FilterReport
from kilolayer.data.parallel import Direction, ParallelText
from kilolayer.data.shapes import Shape
from kilolayer.data.tokenizer import PAD, TokenizerConfig, Tokenizers, tokenizers_for
from kilolayer.errors import OptionError
from kilolayer.evaluate.scores import Bleu
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.translate import Translation, translate_lines
from kilolayer.models.config import ModelConfig
from kilolayer.models.encoder_decoder import EncoderDecoder


def token_losses(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The smoothed loss and the negative log-likelihood, each summed over all labels that are not padding.

    logits [batch, length, vocabulary]; labels int64 [batch, length]. The smoothed target has 1 - smoothing on the label and the
    rest spread evenly over the vocabulary.
    """
    log_probabilities = F.log_softmax(logits.float(), dim=-1)
    # Not a gather: its gradient would be a second tensor of the logits' size, in fp32, also when this is compiled.
    nll = F.nll_loss(log_probabilities.flatten(0, 1), labels.flatten(), ignore_index=PAD, reduction="sum")
    if not smoothing:
        return nll, nll
    spread = -log_probabilities.mean(dim=-1).masked_fill(labels == PAD, 0.0).sum()
    return (1 - smoothing) * nll + smoothing * spread, nll


@dataclass(frozen=True)
class Validation:
    """loss: mean negative log-likelihood of a target token; bleu: None where nothing was translated. All, and by direction."""

    loss: float
    bleu: float | None
    directions: dict[str, Validation]

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


class TranslationTask:
    """The data of a run, ready to train and to validate on."""

    def __init__(self, corpora: Corpora, tokenizers: Tokenizers, cache: Path, data: DataConfig, batches: BatchConfig) -> None:
        self.corpora, self.tokenizers, self.cache = corpora, tokenizers, cache
        self.data_config, self.batch_config = data, batches
        self.tagged = len(corpora.directions) > 1

    @classmethod
    def prepare(
        cls,
        data: DataConfig,
        tokenizer: TokenizerConfig,
        batches: BatchConfig,
        cache: Path,
        tokenizers: Tokenizers | None = None,
    ) -> TranslationTask:
        """Find the text and, unless a run has its own, train the vocabulary."""
        corpora = find_corpora(data, cache)
        return cls(corpora, tokenizers or tokenizers_for(corpora, tokenizer, cache), cache, data, batches)

    def fit(self, model: ModelConfig) -> ModelConfig:
        """The model's configuration with the sizes of the vocabularies."""
        source, target = self.tokenizers.source.vocab_size, self.tokenizers.target.vocab_size
        if self.tokenizers.shared:
            return replace(model, vocab_size=target)
        if model.tie_embeddings is True:
            raise OptionError(
                "one table cannot serve two vocabularies", where="model.tie_embeddings", fix='set it to "output" or false'
            )
        return replace(model, vocab_size=target, source_vocab_size=source)

    def resolve(self, data: DataConfig) -> DataConfig:
        """The data's configuration with nothing implicit left: absolute paths, and every direction by name."""
        paths = {
            name: str(Path(path).resolve()) for name in ("folder", "manifest") if (path := getattr(data, name)) is not None
        }
        return replace(data, **paths, directions=[direction.name for direction in self.corpora.directions], languages=[])

    def training_batches(self, seed: int) -> tuple[Batches, FilterReport]:
        """Endless shuffled batches of all directions, and what the filters removed."""
        mixture = encode_training(self.corpora, self.tokenizers, self.data_config, self.cache)
        return Batches(mixture, self.batch_config, seed), mixture.report

    def validate(
        self,
        model: EncoderDecoder,
        shapes: list[Shape],
        sentences: int,
        search: SearchConfig | None,
    ) -> Validation | None:
        """Loss, and with `search` BLEU, of the validation part; None where there is none.

        Of each corpus and direction the first `sentences` pairs count.
        """
        if not self.corpora.valid:
            return None
        was_training = model.training
        model.eval()
        parts: dict[str, tuple[float, int, Validation]] = {}
        for direction in self.corpora.directions:
            texts = self.corpora.valid_of(direction)
            if texts:
                losses = [self._loss(model, text, shapes, sentences) for text in texts]
                loss, tokens = sum(loss for loss, _ in losses), sum(tokens for _, tokens in losses)
                bleu = None if search is None else self._bleu(model, texts, sentences, search)
                parts[direction.name] = (loss, tokens, Validation(loss / tokens, bleu, {}))
        model.train(was_training)
        scores = [each.bleu for _, _, each in parts.values() if each.bleu is not None]
        return Validation(
            sum(loss for loss, _, _ in parts.values()) / sum(tokens for _, tokens, _ in parts.values()),
            sum(scores) / len(scores) if scores else None,
            {name: each for name, (_, _, each) in parts.items()},
        )

    def translate(
        self, model: EncoderDecoder, lines: Iterable[str], direction: Direction, search: SearchConfig
    ) -> Iterator[Translation]:
        """Translations of lines in the direction's source language, one a line."""
        tag = [self.tokenizers.source.tag_id(direction.target)] if self.tagged else []
        return translate_lines(model, SidedTokenizer(self.tokenizers), lines, search, prefix=tag)

    @torch.inference_mode()
    def _loss(self, model: EncoderDecoder, text: ParallelText, shapes: list[Shape], sentences: int) -> tuple[float, int]:
        pairs = encode_text(text, self.tokenizers, self.cache, tagged=self.tagged)
        device = next(model.parameters()).device
        total, tokens = 0.0, 0
        for batch in in_order(pairs, self.batch_config, shapes, sentences):
            logits = model(batch.source.to(device), batch.target.to(device)).logits
            total += float(token_losses(logits, batch.labels.to(device), 0.0)[1])
            tokens += batch.tokens
        return total, tokens

    def _bleu(self, model: EncoderDecoder, texts: list[ParallelText], sentences: int, search: SearchConfig) -> float:
        pairs = [pair for text in texts for pair in islice(text.pairs(), sentences)]
        answers = self.translate(model, (source for source, _ in pairs), texts[0].direction, search)
        return Bleu().score([answer.text for answer in answers], [target for _, target in pairs]).value


class SidedTokenizer:
    """Reads with the source's vocabulary and writes with the target's."""

    def __init__(self, tokenizers: Tokenizers) -> None:
        self.tokenizers = tokenizers

    def encode(self, lines: list[str]) -> list[list[int]]:
        return self.tokenizers.source.encode(lines)

    def decode(self, ids: list[list[int]]) -> list[str]:
        return self.tokenizers.target.decode(ids)
