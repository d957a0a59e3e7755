"""The configuration of a classifier run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kilolayer.config import Table, merge
from kilolayer.data.examples import ExamplesConfig
from kilolayer.data.tokenizer import TokenizerConfig
from kilolayer.data.vocabulary import ByteVocabulary
from kilolayer.errors import InputError
from kilolayer.models.config import Shape
from kilolayer.tasks.config import Fault, RunConfig, UsualBatch, part_of, usual_training
from kilolayer.tasks.resume_rules import OTHER_BATCHES, OTHER_TOKENS, ResumeRules
from kilolayer.tasks.text_vocabulary import exact_vocabulary, vocabulary_faults
from kilolayer.terminal import counted

# Usual for BERT-like models: learning rates of 1e-5 to 3e-5, 6% warm-up, then linear decay to 0, weight decay 0.1.
# The number of epochs and the learning rate from scratch are our choice.
OPTIMIZER: Table = {"optimizer": "adamw", "weight_decay": 0.1}
FINE_TUNING: Table = {"schedule": "linear", "label_smoothing": 0.0, "valid_sentences": 10**9}
OF_TOKENS = ("tie_embeddings", "output_transform", "output_bias", "first_predicted", "pad_id")
LR, LR_FROM_SCRATCH, EPOCHS, WARMUP = 3e-5, 3e-4, 5, 0.06


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig(RunConfig):
    """Everything that a classifier run is made from."""

    shape: ClassVar[Shape | None] = "encoder"
    resume: ClassVar[ResumeRules] = ResumeRules(
        files=("examples.train", "examples.valid", "examples.test", "examples.folder"),
        breaks={"tokenizer": OTHER_TOKENS, "examples": OTHER_BATCHES},
    )

    task: str = "classify"
    """What is learned."""
    examples: ExamplesConfig = field(default_factory=ExamplesConfig)
    """Labelled sentences, and how they are read."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The vocabulary; with train.start_from, that of the run."""

    @classmethod
    def from_start(cls, tables: Table) -> Table:
        """The inherited tables, without the options of token outputs, padding, and the number of outputs."""
        tables = super().from_start(tables)
        model = {name: value for name, value in tables["model"].items() if name not in OF_TOKENS}
        model["head"] = {name: value for name, value in model.get("head", {}).items() if name != "outputs"}
        return {**tables, "model": model}

    @classmethod
    def defaults(cls, table: Mapping[str, Any]) -> Table:
        started = part_of(table, "train").get("start_from", "none") != "none"
        training = {**FINE_TUNING, "lr": LR if started else LR_FROM_SCRATCH}
        own = usual_training(table, training, OPTIMIZER, EPOCHS, WARMUP)
        return merge({"model": {"head": {}}, "train": own}, exact_vocabulary(table))

    def faults(self) -> Iterator[Fault]:
        model, train, numbers = self.model, self.train, self.examples.layout_kind == "number"
        yield model.head is None, "a classifier needs a head", "model", "remove head from [model]"
        yield model.pad_id is None, "the batches of a classifier are padded", "model", "remove pad_id"
        yield from vocabulary_faults(model, self.tokenizer, self.row_of_mask)
        yield (
            model.max_length is not None and model.max_length < self.examples.length,
            f"the model has {model.max_length} positions, but an example has up to {self.examples.length} tokens",
            "examples",
            "lower examples.length, or raise model.max_length",
        )
        yield (
            numbers and train.label_smoothing > 0,
            "label_smoothing has no effect where labels are numbers",
            "train",
            "remove it",
        )
        yield (
            bool(train.patience) and self.examples.valid is None and self.examples.glue is None,
            "patience has no effect without a validation set",
            "train",
            "set examples.valid",
        )

    @property
    def row_of_mask(self) -> int:
        """1 if the model has a row for the mask token of the masked language model that it starts from, else 0."""
        known = ByteVocabulary.vocab_size if self.tokenizer.of_bytes else self.tokenizer.size
        return int(self.train.start_from is not None and self.model.vocab_size == known + 1)

    def classes_of_run(self) -> tuple[str, ...]:
        """The classes of an existing run, one for each output of its model; empty if the labels are numbers."""
        outputs, classes = 0 if self.model.head is None else self.model.head.outputs, self.examples.classes
        named = len(classes) if self.examples.layout_kind == "class" else 1
        if outputs != named:
            raise InputError(
                f"the model has {counted(outputs, 'output')}, but examples.classes lists {named}",
                where="the run's config.toml",
                fix="restore the classes that it was trained with",
            )
        return tuple(classes)

    def usual_batch(self, length: int | None) -> UsualBatch:
        return UsualBatch(self.examples.rows, length or self.examples.length)
