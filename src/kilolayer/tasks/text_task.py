"""What all tasks on running text share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from kilolayer import hints
from kilolayer.data.documents import TextPart, TextParts, absolute, find_text, text_files
from kilolayer.data.token_text import TokenText, encode_documents
from kilolayer.data.vocabulary import TextVocabulary, load_vocabulary, vocabulary_for
from kilolayer.errors import InputError
from kilolayer.evaluate.likelihood import TextScore
from kilolayer.tasks import registry
from kilolayer.tasks.other_text import OtherText
from kilolayer.tasks.results import write_results
from kilolayer.tasks.task import Task
from kilolayer.tasks.text_config import TextRunConfig

Config = TypeVar("Config", bound=TextRunConfig)


class TextTask(Task[Config], Generic[Config]):
    """The tokenized text of a run; a batch has `rows` rows of `length` tokens. A subclass encodes the parts."""

    test: Any
    """The test set; None if there is none."""

    def __init__(self, text: TextParts, vocabulary: TextVocabulary, cache: Path, config: Config) -> None:
        self._vocabulary, self.config, self.length = vocabulary, config, config.text.length
        self.rows = config.rows

    @classmethod
    def prepare(cls, config: Config, cache: Path, vocabulary: TextVocabulary | None = None) -> Self:
        config = replace(config, text=absolute(config.text))
        text = find_text(config.text, cache)
        return cls(text, vocabulary or vocabulary_for(text.train, config.tokenizer, cache), cache, config)

    @classmethod
    def load_vocabulary(cls, config: Config, folder: Path) -> TextVocabulary:
        return load_vocabulary(folder, config.tokenizer)

    @classmethod
    def read_text(
        cls, config: Config, vocabulary: TextVocabulary, text: OtherText, cache: Path
    ) -> Callable[[Any], dict[str, dict[str, Any]]]:
        """Read files, or folders with all files below them, in the form of `text.test`."""
        title = registry.get(config.task).title
        if min(_mro_index(cls, "score"), _mro_index(cls, "test_scores")) < _mro_index(cls, "scores_of"):
            # The subclass tests its models in its own way: the scores of its base class would be meaningless.
            raise InputError(
                f"{title} is scored on its own test set only", where=hints.argument("test"), fix="give its task scores_of"
            )
        files = text_files(text.files(title), hints.argument("test"))
        tokens = encode_documents(TextPart(files), vocabulary, cache)

        def score(model: Any) -> dict[str, dict[str, Any]]:
            return {"test": {key: asdict(each) for key, each in cls.scores_of(model, tokens, vocabulary, config).items()}}

        return score

    @classmethod
    @abstractmethod
    def scores_of(cls, model: Any, text: TokenText, vocabulary: TextVocabulary, config: Config) -> Mapping[str, TextScore]:
        """The scores of any text, by key."""

    @property
    def vocabulary(self) -> TextVocabulary:
        return self._vocabulary

    def resolve(self, config: Config) -> Config:
        """The configuration with the size of the vocabulary and absolute paths."""
        model = replace(config.model, vocab_size=self.vocabulary.vocab_size + config.more_rows)
        tokenizer = config.tokenizer.resolved(self.vocabulary.vocab_size)
        return replace(config, model=model, tokenizer=tokenizer, text=absolute(config.text))

    def score(self, model: Any, folder: Path, weights: Mapping[str, Any] | None = None) -> None:
        """Write the scores of the test set and samples of the model's output into a run folder."""
        tested = {} if self.test is None else {"test": self.test_scores(model)}
        scores = {part: {key: asdict(score) for key, score in found.items()} for part, found in tested.items()}
        write_results(folder, self.samples(model), scores, weights)

    @abstractmethod
    def test_scores(self, model: Any) -> Mapping[str, TextScore]:
        """The scores of the test set, by key."""

    @abstractmethod
    def samples(self, model: Any) -> list[dict[str, str]]:
        """Texts for the report, from a part that the model was not trained on, if there is one."""


def _mro_index(cls: type, name: str) -> int:
    """The position in the MRO of `cls` of the class that defines a method."""
    return next(index for index, each in enumerate(cls.__mro__) if name in vars(each))
