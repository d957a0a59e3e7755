"""The configuration of a translator run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from kilolayer import hints
from kilolayer.config import Table
from kilolayer.data.corpora import DataConfig
from kilolayer.data.grammar import write_corpus
from kilolayer.data.shapes import BatchConfig
from kilolayer.data.tokenizer import TokenizerConfig
from kilolayer.errors import OptionError
from kilolayer.generate.config import SearchConfig
from kilolayer.models.config import Shape
from kilolayer.tasks.config import Fault, RunConfig, UsualBatch
from kilolayer.tasks.resume_rules import OTHER_BATCHES, OTHER_TOKENS, ResumeRules
from kilolayer.tasks.text_vocabulary import size_of
from kilolayer.tasks.train_config import TrainConfig

NO_VALIDATION = "patience has no effect without a validation set"


@dataclass(frozen=True, kw_only=True)
class TranslationTrainConfig(TrainConfig):
    """`[train]`, with options that only translators have."""

    valid_bleu: bool = False
    """Translate the validation set at each validation and compute BLEU."""


@dataclass(frozen=True, kw_only=True)
class TranslationConfig(RunConfig):
    """Everything that a translator run is made from."""

    shape: ClassVar[Shape | None] = "encoder_decoder"
    resume: ClassVar[ResumeRules] = ResumeRules(
        files=("data.folder", "data.manifest"),
        testing=("search",),
        breaks={
            "tokenizer": OTHER_TOKENS,
            "data": OTHER_BATCHES,
            "batches": OTHER_BATCHES,
            "train.valid_bleu": "the best validation so far was measured differently",
        },
    )

    task: str = "translation"
    """What is learned."""
    train: TranslationTrainConfig = field(default_factory=TranslationTrainConfig)
    """Steps, optimizer, schedule."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text and directions."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The vocabulary."""
    batches: BatchConfig = field(default_factory=BatchConfig)
    """Tokens and shapes of a batch."""
    search: SearchConfig = field(default_factory=SearchConfig)
    """How translations are found."""

    @classmethod
    def defaults(cls, table: Mapping[str, Any]) -> Table:
        """The model's tables get the size of the vocabulary to be trained (a maximum); two vocabularies have a table each."""
        tokenizer = table.get("tokenizer", {})
        if not isinstance(tokenizer, Mapping) or tokenizer.get("path", "none") != "none":
            return {}
        tables: Table = {} if tokenizer.get("shared", True) else {"tie_embeddings": "output"}
        size = size_of(tokenizer)
        return {"model": {**tables, "vocab_size": size} if isinstance(size, int) else tables}

    @classmethod
    def embedded(cls, folder: Path) -> Table:
        return {"data": {"folder": str(folder)}}

    @classmethod
    def write_embedded(cls, folder: Path) -> None:
        """Write a small corpus of English and German, which a grammar generates."""
        write_corpus(folder)

    def faults(self) -> Iterator[Fault]:
        unvalidated = self.data.folder is not None and self.data.valid is None and not self.data.valid_share
        yield (
            bool(self.train.patience) and unvalidated,
            NO_VALIDATION,
            "train",
            "set data.valid or data.valid_share",
        )
        yield self.tokenizer.of_bytes, "a translator cannot use bytes as tokens", "tokenizer", 'set kind = "unigram" or "bpe"'
        for kind, name in (("byte_bpe", "byte-level BPE"), ("wordpiece", "WordPiece")):
            yield self.tokenizer.kind == kind, f"a translator cannot use {name}", "tokenizer", 'set kind = "unigram" or "bpe"'

    @property
    def usage(self) -> str:
        direction = f" {hints.argument('direction', self.data.directions[0])}" if len(self.data.directions) > 1 else ""
        return super().usage.replace("{}", f"{{}}{direction}")

    def usual_batch(self, length: int | None) -> UsualBatch:
        length = length or 64
        return UsualBatch(max(1, self.batches.tokens // (2 * length)), length, self.search.width)

    def check_sharing(self) -> None:
        if self.train.valid_bleu and self.search.method == "sample":
            raise OptionError(
                "samples cannot be drawn while several processes share the model",
                where="train.valid_bleu",
                fix='set it to false, or set search.method to "beam"',
            )
