"""Translation: text in two languages, an encoder-decoder, the loss per token, BLEU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kilolayer import hints
from kilolayer.data.all_over import members_all_over
from kilolayer.data.batches import Batch, Batches, in_order
from kilolayer.data.corpora import Corpora, DataConfig, aligned_text, find_corpora, find_test
from kilolayer.data.encode import encode_text, encode_training
from kilolayer.data.frequencies import count_targets, frequency_loss
from kilolayer.data.held_out import HeldOut
from kilolayer.data.mixing import Mixture
from kilolayer.data.parallel import Direction, Pair, ParallelText
from kilolayer.data.shapes import Shape
from kilolayer.data.text import read_lines
from kilolayer.data.tokenizer import PAD, Tokenizers, tokenizers_for
from kilolayer.errors import OptionError, unknown
from kilolayer.evaluate.likelihood import perplexity
from kilolayer.evaluate.scores import Bleu
from kilolayer.files.paths import kind_of, storable
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.translate import Translation, translate_lines
from kilolayer.layers.modules import in_mode
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.runtime.recorder import Recorder, WorkItem
from kilolayer.runtime.runtime import runtime_of
from kilolayer.tasks.other_text import OtherText
from kilolayer.tasks.results import read_scores
from kilolayer.tasks.task import Answers, Loss, Task
from kilolayer.tasks.token_loss import loss_of_tokens
from kilolayer.tasks.translation.config import NO_VALIDATION, TranslationConfig
from kilolayer.tasks.translation.scores import TestResult, check_same_test, hypotheses_path, scores_of, write_translations
from kilolayer.terminal import say

GAINS = 8
"""The maximum number of validation sets on which the use of the source is measured: one more forward pass for each."""


@dataclass(frozen=True)
class TranslationValidation:
    """The result of a validation, in total and by direction.

    loss: mean negative log-likelihood per target token. bleu: None if nothing was translated. source_gain: the rise of the
    loss if each sentence is given the source of another one; near 0, the model does not read its source. None: not measured.
    """

    loss: float
    bleu: float | None
    directions: dict[str, TranslationValidation]
    source_gain: float | None = None

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    @property
    def quality(self) -> float:
        """BLEU if it was measured, else the negative loss."""
        return -self.loss if self.bleu is None else self.bleu

    def metrics(self) -> dict[str, Any]:
        """The values for metrics.jsonl."""
        directions = {name: {"loss": each.loss, "bleu": each.bleu} for name, each in self.directions.items()}
        values = {"loss": self.loss, "perplexity": self.perplexity, "bleu": self.bleu, "source_gain": self.source_gain}
        return {**values, "directions": directions}

    def __str__(self) -> str:
        gain = "" if self.source_gain is None else f", source gain {self.source_gain:.2f}"
        bleu = "" if self.bleu is None else f", BLEU {self.bleu:.1f}"
        return f"loss {self.loss:.4f}, perplexity {self.perplexity:.2f}{gain}{bleu}"


class TranslationTask(Task[TranslationConfig]):
    """The data of a run, ready for training, validation and testing."""

    def __init__(
        self, corpora: Corpora, tokenizers: Tokenizers, cache: Path, config: TranslationConfig, held_out: HeldOut | None = None
    ) -> None:
        self.corpora, self.tokenizers, self.cache, self.config = corpora, tokenizers, cache, config
        self._held_out = held_out or HeldOut()
        self.shapes: list[Shape] = []
        self.tagged = len(corpora.directions) > 1

    @classmethod
    def prepare(cls, config: TranslationConfig, cache: Path, vocabulary: Tokenizers | None = None) -> TranslationTask:
        config = replace(config, data=_absolute(config.data))
        corpora = find_corpora(config.data, cache)
        if config.train.patience and not corpora.valid:
            raise OptionError(NO_VALIDATION, where="train", fix="list a corpus under [[valid]] in the manifest")
        for gap in corpora.gaps():
            say(gap)
        held_out = corpora.read_held_out()
        return cls(corpora, vocabulary or tokenizers_for(corpora, config.tokenizer, cache), cache, config, held_out)

    @classmethod
    def load_vocabulary(cls, config: TranslationConfig, folder: Path) -> Tokenizers:
        return Tokenizers.load(folder)

    @classmethod
    def answers(cls, config: TranslationConfig, folder: Path, cache: Path) -> Answers | None:
        """The references of all parts of the test set, in order, and the translations in the run folder."""
        corpora = find_corpora(config.data, cache)
        tested = {part: corpora.test_of(part) for part in corpora.scored_parts}
        kept = {part: hypotheses_path(folder, part) for part in tested}
        if not tested or any(kind_of(path) != "file" for path in kept.values()):
            return None
        check_same_test(read_scores(folder), corpora.read_held_out(), folder)
        references = [target for pairs in tested.values() for _, target in pairs]
        hypotheses = [line for path in kept.values() for line in read_lines(path)]
        return Answers(references, hypotheses) if len(references) == len(hypotheses) else None

    @classmethod
    def read_text(
        cls, config: TranslationConfig, vocabulary: Tokenizers, text: OtherText, cache: Path
    ) -> Callable[[Any], dict[str, dict[str, Any]]]:
        """Read stems of corpora, in the form of `data.test`, or two files, a source and its reference."""
        task = cls.of_tests(config, vocabulary, find_tests(config, text, cache), cache)
        return lambda model: scores_of(task.results(model), [])

    @classmethod
    def of_tests(
        cls, config: TranslationConfig, vocabulary: Tokenizers, tests: list[ParallelText], cache: Path
    ) -> TranslationTask:
        """A task that has only test text, in some of the run's directions."""
        directions = [Direction.parse(name) for name in config.data.directions]
        for test in tests:
            if test.direction not in directions:
                raise unknown(test.direction.name, config.data.directions, kind="direction", where="of this run")
        corpora = Corpora(directions, [], [], tests)
        return cls(corpora, vocabulary, cache, config, corpora.read_held_out())

    @property
    def vocabulary(self) -> Tokenizers:
        return self.tokenizers

    def resolve(self, config: TranslationConfig) -> TranslationConfig:
        """The configuration with the sizes of the vocabularies, absolute paths, and the name of every direction."""
        source, target = self.tokenizers.source.vocab_size, self.tokenizers.target.vocab_size
        one = self.tokenizers.one_table
        sizes = {"vocab_size": target} if one else {"vocab_size": target, "source_vocab_size": source}
        if not one and config.model.tie_embeddings is True:
            raise OptionError(
                "one embedding table cannot be shared by two vocabularies",
                where="model.tie_embeddings",
                fix='set it to "output" or false',
            )
        directions = [direction.name for direction in self.corpora.directions]
        data = replace(_absolute(config.data), directions=directions, languages=[])
        tokenizer = config.tokenizer.resolved(max(source, target))
        return replace(config, model=replace(config.model, **sizes), data=data, tokenizer=tokenizer)

    def training_batches(self, seed: int) -> Batches:
        """Endless shuffled batches of all directions. Validations then use the same shapes."""
        batches = Batches(self._training_pairs, self.config.batches, seed, self.cache)
        self.shapes = batches.shapes
        if self.config.model.max_length is not None:
            self._check_positions(self.config.model.max_length)
        return batches

    def _check_positions(self, positions: int) -> None:
        """Raise if a batch of training or validation is longer than the model's learned positions."""
        most = self.config.train.valid_sentences
        validated = (batch.parts[:2] for text in self.corpora.valid for batch in self._valid_batches(text, most))
        for part, longest, fix in (
            ("training", max(max(shape.source, shape.target) for shape in self.shapes), "lower data.filters.max_tokens"),
            ("validation", max((ids.shape[1] for parts in validated for ids in parts), default=0), "leave it out"),
        ):
            if positions < longest:
                raise OptionError(
                    f"the model has {positions} positions, but a {part} sentence has up to {longest} tokens",
                    where="model",
                    fix=f"{fix}, or raise model.max_length",
                )

    def frequency_loss(self) -> float:
        """The frequency loss of the target tokens, with the weights of an epoch."""
        return frequency_loss(count_targets(self._training_pairs))

    def held_out(self) -> HeldOut:
        return self._held_out

    def loss(self, model: EncoderDecoder, parts: Sequence[Tensor], *, hidden_states: bool) -> Loss:
        """Parts: source and target, int64 [rows, length], and labels, the target's next tokens."""
        source, target, labels = parts
        output = model(source, target, hidden_states=hidden_states)
        return loss_of_tokens(model, output, labels, self.config.train.label_smoothing)

    def model_inputs(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        source, target, labels = parts
        real = labels[:, 0] != PAD  # rows that only fill up a batch have no labels
        return source[real], target[real]

    def validate(self, model: EncoderDecoder, most: int, recorder: Recorder | None = None) -> TranslationValidation | None:
        """The loss on the validation set and, with `valid_bleu`, BLEU; None if there is no such set.

        `most` pairs from all over each corpus and direction are used. recorder: runs the forward pass and the loss of each
        batch.
        """
        if not self.corpora.valid:
            return None
        recorder = recorder or Recorder(next(model.parameters()).device)
        recorder.drop_if_moved(model)
        parts: dict[str, tuple[float, int, TranslationValidation]] = {}
        with in_mode(model, training=False):
            for direction in self.corpora.directions:
                texts = self.corpora.valid_of(direction)
                if texts:
                    losses = [self._loss(model, text, most, recorder) for text in texts]
                    loss, tokens = sum(loss for loss, _ in losses), sum(tokens for _, tokens in losses)
                    bleu = self._bleu(model, texts, most) if self.config.train.valid_bleu else None
                    parts[direction.name] = (loss, tokens, TranslationValidation(loss / tokens, bleu, {}))
            gain = self._source_gain(model, most, recorder)
        scores = [each.bleu for _, _, each in parts.values() if each.bleu is not None]
        return TranslationValidation(
            sum(loss for loss, _, _ in parts.values()) / sum(tokens for _, tokens, _ in parts.values()),
            sum(scores) / len(scores) if scores else None,
            {name: each for name, (_, _, each) in parts.items()},
            gain,
        )

    def score(self, model: EncoderDecoder, folder: Path, weights: Mapping[str, Any] | None = None) -> None:
        """Translate the test set; write translations, scores and samples into a run folder."""
        write_translations(folder, self.results(model), self.corpora.train, self._held_out, weights)

    def results(self, model: EncoderDecoder) -> list[TestResult]:
        """Translate and score the test set, part by part."""
        results = []
        for part in self.corpora.scored_parts:
            pairs = self.corpora.test_of(part)
            answers = self.translate(model, [source for source, _ in pairs], part.direction, self.config.search)
            results.append(TestResult.of(part, pairs, [answer.text for answer in answers]))
        return results

    def translate(
        self, model: EncoderDecoder, lines: Iterable[str], direction: Direction, search: SearchConfig
    ) -> Iterator[Translation]:
        """Translate lines of the direction's source language, one translation per line."""
        tag = [self.tokenizers.source.tag_id(direction.target)] if self.tagged else []
        return translate_lines(model, SidedTokenizer(self.tokenizers), lines, search, prefix=tag)

    @cached_property
    def _training_pairs(self) -> Mixture:
        return encode_training(self.corpora, self.tokenizers, self.config.data, self.cache)

    def _loss(self, model: EncoderDecoder, text: ParallelText, most: int, recorder: Recorder) -> tuple[float, int]:
        total, tokens = 0.0, 0
        for batch in self._valid_batches(text, most):
            total += self._nll(model, batch.parts, recorder)
            tokens += batch.tokens
        return total, tokens

    def _source_gain(self, model: EncoderDecoder, most: int, recorder: Recorder) -> float | None:
        """The rise of the loss with the sources of other sentences, on one batch of at most GAINS validation sets."""
        rise, tokens = 0.0, 0
        for text in self.corpora.valid[:: -(-len(self.corpora.valid) // GAINS)]:
            batch = max(self._valid_batches(text, most), key=lambda batch: batch.tokens)
            source, *rest = batch.parts
            if len(source) > 1:
                others = source.roll(len(source) // 2, dims=0)
                rise += self._nll(model, (others, *rest), recorder) - self._nll(model, batch.parts, recorder)
                tokens += batch.tokens
        return rise / tokens if tokens else None

    def _valid_batches(self, text: ParallelText, most: int) -> Iterator[Batch]:
        pairs = encode_text(text, self.tokenizers, self.cache, tagged=self.tagged)
        return in_order(pairs, self.config.batches, self.shapes, most)

    @torch.inference_mode()
    def _nll(self, model: EncoderDecoder, parts: tuple[Tensor, ...], recorder: Recorder) -> float:
        def nll(source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
            return runtime_of(model).token_losses(model(source, target).logits, labels, 0.0)[1]

        return float(recorder.run([WorkItem("nll", nll, parts)], restart=lambda: True))

    def _bleu(self, model: EncoderDecoder, texts: list[ParallelText], most: int) -> float:
        pairs = [pair for text in texts for pair in _some_pairs(text, most)]
        answers = self.translate(model, (source for source, _ in pairs), texts[0].direction, self.config.search)
        return Bleu().score([answer.text for answer in answers], [target for _, target in pairs]).value


def _some_pairs(text: ParallelText, most: int) -> Iterator[Pair]:
    """The pairs that validation reads, at most `most`."""
    members = set(members_all_over(text.size, most).tolist())
    return (pair for number, pair in enumerate(text.pairs()) if number in members)


def find_tests(config: TranslationConfig, text: OtherText, cache: Path) -> list[ParallelText]:
    """The test sets that `text` names, in all of the run's directions or in the one that it names."""
    names = config.data.directions
    if text.direction is not None and text.direction not in names:
        raise unknown(text.direction, names, kind="direction")
    directions = [Direction.parse(name) for name in ([text.direction] if text.direction else names)]
    if text.source is None or text.reference is None:
        return find_test(config.data, text.test, directions, cache)
    if len(directions) > 1:
        raise OptionError("the run has several directions", fix=f"choose one: {hints.argument('direction', names[0])}")
    return [aligned_text(Path(text.source), Path(text.reference), directions[0])]


def _absolute(data: DataConfig) -> DataConfig:
    """The configuration with absolute paths, for a run to store."""
    paths = {name: str(storable(Path(path))) for name in ("folder", "manifest") if (path := getattr(data, name)) is not None}
    return replace(data, **paths)


class SidedTokenizer:
    """Encodes with the source vocabulary and decodes with the target vocabulary."""

    def __init__(self, tokenizers: Tokenizers) -> None:
        self.tokenizers = tokenizers

    def encode(self, lines: list[str]) -> list[list[int]]:
        return self.tokenizers.source.encode(lines)

    def decode(self, ids: list[list[int]]) -> list[str]:
        return self.tokenizers.target.decode(ids)
