"""A trained classifier as a Python object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast, overload

from kilolayer.data.example_batches import EncodedExamples
from kilolayer.data.example_file import Example
from kilolayer.data.vocabulary import TextVocabulary
from kilolayer.errors import InputError
from kilolayer.evaluate.predictions import predict, probabilities
from kilolayer.models.encoder import Encoder
from kilolayer.runs.trained_run import TrainedRun, as_list, batched, checked_text
from kilolayer.tasks.classify.config import ClassifyConfig

ROWS_AT_ONCE = 1024
Row = str | Sequence[str]
"""A sentence, or two: as a pair, or separated by a tab."""


@dataclass(frozen=True)
class Prediction:
    """The label of a row and the probability of every class; for a regression run, the number and no classes.

    cut: the row was longer than examples.length tokens, and its end was ignored.
    """

    sentences: list[str]
    label: str | float
    probabilities: dict[str, float]
    cut: bool


class Classifier(TrainedRun):
    """A trained run of the task `classify`."""

    @property
    def config(self) -> ClassifyConfig:
        """The run's complete configuration, with every default filled in."""
        return cast("ClassifyConfig", super().config)

    @overload
    def predict(self, rows: str) -> Prediction: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def predict(self, rows: Iterable[Row]) -> list[Prediction]: ...
    def predict(self, rows: str | Iterable[Row]) -> Prediction | list[Prediction]:
        """The label and probabilities of each row, a sentence or a pair `("one", "other")`; one text gives one result."""
        listed: list[Row] = as_list(rows, "row")
        checked = [self.sentences_of(row, f"row {number}") for number, row in enumerate(listed, 1)]
        found = list(self.predictions(checked))
        return found[0] if isinstance(rows, str) else found

    def predictions(self, rows: Iterable[list[str]], *, at_once: int = ROWS_AT_ONCE) -> Iterator[Prediction]:
        """Yield the predictions for many rows, each in the form that `sentences_of` returns; `at_once` rows are read ahead."""
        groups = batched(rows, at_once)
        return (prediction for some in groups for prediction in self._predict(some))

    def sentences_of(self, row: Row, where: str) -> list[str]:
        """The sentences of a row, checked to be as many as the run expects; where: the row's location, for errors."""
        sentences = row.split("\t") if isinstance(row, str) else list(row) if isinstance(row, Sequence) else [row]
        for sentence in sentences:
            checked_text(sentence, where)
        sentences = [sentence.strip() for sentence in sentences]
        if len(sentences) != self.sentences:
            wanted = "one sentence" if self.sentences == 1 else "two sentences, with a tab between them,"
            raise InputError(
                f"the run expects {wanted} per line, but this line has {len(sentences)}", where=where, fix="correct the line"
            )
        if not all(sentences):
            raise InputError("a sentence is empty", where=where, fix="fill it in, or remove the line")
        return sentences

    @property
    def sentences(self) -> int:
        """The number of sentences in a row: 1 or 2."""
        return 1 if self.config.examples.columns("train").second is None else 2

    def _predict(self, rows: list[list[str]]) -> list[Prediction]:
        model, config, classes = self.reader, self.config.examples, self.config.classes_of_run()
        assert isinstance(model, Encoder)
        examples = [Example(row[0], row[1] if len(row) > 1 else None, None, 0) for row in rows]
        encoded = EncodedExamples(examples, cast("TextVocabulary", self.tokenizer), classes, config.length)
        scores = predict(model, encoded, min(config.rows, len(rows)))
        if not classes:
            return [
                Prediction(row, float(score[0]), {}, cut) for row, score, cut in zip(rows, scores, encoded.was_cut, strict=True)
            ]
        return [
            Prediction(row, classes[int(share.argmax())], dict(zip(classes, share.tolist(), strict=True)), cut)
            for row, share, cut in zip(rows, probabilities(scores), encoded.was_cut, strict=True)
        ]
