"""Classification and regression: one or two sentences, an encoder with a head, a class or a number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from kilolayer.data.all_over import members_all_over
from kilolayer.data.example_batches import EncodedExamples, ExampleBatches, real_rows
from kilolayer.data.example_file import ExampleFile
from kilolayer.data.examples import ExampleParts, find_examples, read_test, text_of
from kilolayer.data.frequencies import frequency_loss
from kilolayer.data.held_out import HeldOut
from kilolayer.data.vocabulary import TextVocabulary, load_vocabulary, vocabulary_for
from kilolayer.errors import OptionError, shown
from kilolayer.evaluate.classification import require_packages
from kilolayer.evaluate.predictions import LabelLoss, measure_labels, predict, types_for
from kilolayer.files.writing import write
from kilolayer.models.encoder import Encoder
from kilolayer.models.head import Head
from kilolayer.runtime.recorder import Recorder
from kilolayer.tasks import registry
from kilolayer.tasks.classify.config import ClassifyConfig
from kilolayer.tasks.other_text import OtherText
from kilolayer.tasks.results import VALIDATION, write_results
from kilolayer.tasks.task import Loss, Task
from kilolayer.terminal import say

SAMPLES = 10
PREDICTIONS = "test.predictions.tsv"


class ClassifyTask(Task[ClassifyConfig]):
    """The examples of a run, ready for training, validation and testing."""

    starts_from: ClassVar[tuple[str, ...]] = ("masked_lm",)

    def __init__(self, parts: ExampleParts, vocabulary: TextVocabulary, config: ClassifyConfig) -> None:
        self._vocabulary, self.config, self.parts = vocabulary, config, parts
        self.classes = parts.classes
        # Rows beyond the number of examples would contain only padding.
        self.metrics, self.rows = config.examples.metrics, min(config.examples.rows, len(parts.train))
        self.train, self.valid, self.test = map(self._encoded, (parts.train, parts.valid, parts.test))
        assert self.train is not None
        outputs = len(self.classes) or 1
        given = config.model.head
        if given is not None and given.outputs not in (outputs, Head.outputs):
            raise OptionError(
                f"outputs is {given.outputs}, but the labels need {outputs}",
                where="model.head",
                fix="remove model.head.outputs",
            )

    def _encoded(self, part: ExampleFile | None) -> EncodedExamples | None:
        if part is None:
            return None
        return EncodedExamples(part.examples, self.vocabulary, self.classes, self.config.examples.length)

    @classmethod
    def prepare(cls, config: ClassifyConfig, cache: Path, vocabulary: TextVocabulary | None = None) -> ClassifyTask:
        require_packages()
        parts = find_examples(config.examples)
        vocabulary = vocabulary or vocabulary_for(text_of(parts.train, cache), config.tokenizer, cache)
        return cls(parts, vocabulary, config)

    @classmethod
    def load_vocabulary(cls, config: ClassifyConfig, folder: Path) -> TextVocabulary:
        return load_vocabulary(folder, config.tokenizer)

    @classmethod
    def read_text(
        cls, config: ClassifyConfig, vocabulary: TextVocabulary, text: OtherText, cache: Path
    ) -> Callable[[Any], dict[str, dict[str, Any]]]:
        """Read a file of labelled examples with the same columns as the run's own."""
        require_packages()
        examples, title = config.examples, registry.get(config.task).title
        path = text.one(title, "file")
        classes = config.classes_of_run()
        part = read_test(Path(path), examples)
        encoded = EncodedExamples(part.examples, vocabulary, classes, examples.length)

        def score(model: Any) -> dict[str, dict[str, Any]]:
            found = predict(model, encoded, min(examples.rows, len(part)))
            assert encoded.labels is not None
            measured = measure_labels(found, encoded.labels, len(classes), examples.metrics)
            return {"test": _score_table(measured)}

        return score

    @property
    def vocabulary(self) -> TextVocabulary:
        return self._vocabulary

    def resolve(self, config: ClassifyConfig) -> ClassifyConfig:
        """The configuration with the sizes of the vocabulary and the head, the classes in order, and absolute paths."""
        known, head = self.vocabulary.vocab_size, config.model.head
        assert head is not None
        of_mask = config.train.start_from is not None and config.model.vocab_size == known + 1
        model = replace(config.model, vocab_size=known + of_mask, head=replace(head, outputs=len(self.classes) or 1))
        examples = replace(config.examples, classes=list(self.classes), **config.examples.absolute())
        return replace(config, model=model, examples=examples, tokenizer=config.tokenizer.resolved(known))

    def adopt(self, weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The body of another model, without its token outputs; also its head, if it has the same form.

        If an imported model has only the first matrix of a head, BERT's pooler, that matrix is taken.
        """
        head = {name: tensor for name, tensor in own.items() if name.startswith("head.")}
        theirs = {name: weights[name] for name in head if name in weights}
        alike = theirs.keys() == head.keys() and all(theirs[name].shape == tensor.shape for name, tensor in head.items())
        if alike or "head.output.weight" not in weights:
            head |= theirs
        of_tokens = ("head.", "vocabulary.", "transform.", "output_bias.")
        return {name: tensor for name, tensor in weights.items() if not name.startswith(of_tokens)} | head

    def training_batches(self, seed: int) -> ExampleBatches:
        """Endless shuffled batches of the training examples."""
        assert self.train is not None
        return ExampleBatches(self.train, self.rows, seed)

    def loss(self, model: Encoder, parts: Sequence[Tensor], *, hidden_states: bool) -> Loss:
        """Cross-entropy of the classes, or squared error of the numbers.

        parts: tokens int64 [rows, length], in which rows of only padding are not counted; labels int64 [rows] or fp32 [rows].
        """
        tokens, labels = parts
        output = model(tokens, **types_for(model.config, tokens), hidden_states=hidden_states)
        logits, real = output.logits, real_rows(tokens)
        assert logits is not None
        if not self.classes:
            total = nll = (logits[:, 0] - labels).square().masked_fill(~real, 0.0).sum()
            return Loss(total, nll, real.sum(), output)
        log_probabilities = F.log_softmax(logits, dim=-1)
        each = F.nll_loss(log_probabilities, labels, reduction="none")
        nll = total = each.masked_fill(~real, 0.0).sum()
        if smoothing := self.config.train.label_smoothing:
            spread = -log_probabilities.mean(dim=-1).masked_fill(~real, 0.0).sum()
            total = (1 - smoothing) * nll + smoothing * spread
        return Loss(total, nll, real.sum(), output)

    def model_inputs(self, parts: Sequence[Tensor]) -> dict[str, Tensor]:
        tokens = parts[0][real_rows(parts[0])]
        return {"tokens": tokens, **types_for(self.config.model, tokens)}

    def held_out(self) -> HeldOut:
        return HeldOut(*(None if part is None else part.digest for part in (self.valid, self.test)))

    def frequency_loss(self) -> float | None:
        """The frequency loss of the classes; None if the labels are numbers."""
        assert self.train is not None
        assert self.train.labels is not None
        return frequency_loss(np.bincount(self.train.labels)) if self.classes else None

    def validate(self, model: Encoder, most: int, recorder: Recorder | None = None) -> LabelLoss | None:
        """The loss and metrics of `most` examples from all over the validation set; None if there is no such set.

        recorder: runs the forward pass of each batch.
        """
        return None if self.valid is None else self._measured(self.valid, predict(model, self.valid, self.rows, most, recorder))

    def score(self, model: Encoder, folder: Path, weights: Mapping[str, Any] | None = None) -> None:
        """Write the scores of the test set and samples into a run folder.

        If the test set has no labels, its predictions are written in GLUE's submission format. The scores are then those of the
        validation set, as they are without a test set. `metric` is the one by which the best checkpoint was chosen.
        """
        scores: dict[str, Any] = {}
        samples: list[dict[str, str]] = []
        if self.test is not None and self.test.labels is None:
            labels = self.predicted(predict(model, self.test, self.rows))
            lines = ["index\tprediction", *(f"{index}\t{label}" for index, label in enumerate(labels))]
            write(folder / PREDICTIONS, "".join(f"{line}\n" for line in lines))
            assert self.parts.test is not None
            column = self.config.examples.columns("test").label
            say(f"{self.parts.test.path} has no column {shown(column)}: not scored; predictions: {folder / PREDICTIONS}")
        tested = self.test is not None and self.test.labels is not None
        encoded, part = (self.test, self.parts.test) if tested else (self.valid, self.parts.valid)
        if encoded is not None and part is not None:
            found = predict(model, encoded, self.rows)
            scores["test" if tested else VALIDATION] = _score_table(self._measured(encoded, found))
            samples = _samples(part, self.predicted(found))
        write_results(folder, samples, scores, weights)

    def predicted(self, scores: np.ndarray) -> list[str]:
        """The predicted labels, as text, for scores [examples, outputs]."""
        if not self.classes:
            return [f"{value:.3f}" for value in scores[:, 0]]
        return [self.classes[index] for index in scores.argmax(axis=1)]

    def _measured(self, examples: EncodedExamples, scores: np.ndarray) -> LabelLoss:
        assert examples.labels is not None
        labels = examples.labels[members_all_over(len(examples), len(scores))]
        return measure_labels(scores, labels, len(self.classes), self.metrics)


def _score_table(measured: LabelLoss) -> dict[str, Any]:
    """The entry of scores.json; its first score, `metric`, is the one by which the best checkpoint is chosen."""
    (_, chosen), *others = measured.scores.items()
    return {key: asdict(score) for key, score in {"metric": chosen, **dict(others)}.items()}


def _samples(part: ExampleFile, labels: Sequence[str]) -> list[dict[str, str]]:
    """A few examples from all over the set, with their predictions."""
    chosen = np.unique(np.linspace(0, len(part) - 1, SAMPLES).astype(np.int64)).tolist()
    samples = []
    for index in chosen:
        example = part.examples[index]
        sample = {"first": example.first, "second": example.second, "label": example.label, "prediction": labels[index]}
        samples.append({name: str(value) for name, value in sample.items() if value is not None})
    return samples
