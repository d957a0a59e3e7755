"""A trained masked language model as a Python object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast, overload

from kilolayer.data.vocabulary import TextVocabulary
from kilolayer.errors import OptionError, shown
from kilolayer.generate.fill import Filled, fill_texts, masked_tokens
from kilolayer.models.encoder import Encoder
from kilolayer.runs.trained_run import TrainedRun, as_texts, batched
from kilolayer.tasks.masked_lm.config import MaskedLMConfig

TEXTS_AT_ONCE = 32


class MaskedLanguageModel(TrainedRun):
    """A trained run of the task `masked_lm`."""

    @property
    def config(self) -> MaskedLMConfig:
        """The run's complete configuration, with every default filled in."""
        return cast("MaskedLMConfig", super().config)

    @overload
    def fill(self, texts: str, *, top: int = 5) -> Filled: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def fill(self, texts: Iterable[str], *, top: int = 5) -> list[Filled]: ...
    def fill(self, texts: str | Iterable[str], *, top: int = 5) -> Filled | list[Filled]:
        """The `top` best tokens for each <mask> of a text (`.masks`), and the text with the best one filled in (`.filled`)."""
        listed = as_texts(texts, "text")
        found = list(self.fillings(((text, f"text {number}") for number, text in enumerate(listed, 1)), top=top))
        return found[0] if isinstance(texts, str) else found

    def fillings(self, texts: Iterable[tuple[str, str]], *, top: int = 5, at_once: int = TEXTS_AT_ONCE) -> Iterator[Filled]:
        """Yield the results for many texts, each given with its location, for errors; `at_once` texts are read ahead."""
        if not isinstance(top, int) or top < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionError(f"top is {shown(top)}", fix="top must be at least 1")
        groups = batched(texts, at_once)
        return (filled for some in groups for filled in self._fill(some, top))

    def _fill(self, texts: list[tuple[str, str]], top: int) -> list[Filled]:
        model, vocabulary = self.reader, cast("TextVocabulary", self.tokenizer)
        assert isinstance(model, Encoder)
        rows = [masked_tokens(text, vocabulary, self.config.text.length, where) for text, where in texts]
        return fill_texts(model, [text for text, _ in texts], rows, vocabulary, top)
