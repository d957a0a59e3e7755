"""A trained translator as a Python object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast, overload

from kilolayer import hints
from kilolayer.config import build, override, table_of
from kilolayer.data.parallel import Direction
from kilolayer.data.tokenizer import Tokenizers
from kilolayer.errors import OptionError, unknown
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.translate import Translation, translate_lines
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.runs.trained_run import TrainedRun, as_texts, checked_text
from kilolayer.tasks.translation.config import TranslationConfig
from kilolayer.tasks.translation.task import SidedTokenizer


class Translator(TrainedRun):
    """A trained run of the task `translation`."""

    @property
    def config(self) -> TranslationConfig:
        """The run's complete configuration, with every default filled in."""
        return cast("TranslationConfig", super().config)

    @overload
    def translate(  # pyright: ignore[reportOverlappingOverload]
        self, lines: str, *, direction: str | None = None, **search: Any
    ) -> str: ...
    @overload
    def translate(self, lines: Iterable[str], *, direction: str | None = None, **search: Any) -> list[str]: ...
    def translate(self, lines: str | Iterable[str], *, direction: str | None = None, **search: Any) -> str | list[str]:
        """The translation of each line, in order; one text gives one translation.

        direction: such as "en-de", required if the run has several. search: options of `SearchConfig`, such as `beam=4,
        length_penalty=0.6`, which override the run's own.
        """
        config = self.search(**search)
        if config.n_best > 1:
            raise OptionError(
                f"n_best={config.n_best}, but translate returns one translation per line",
                fix="use .translations(lines, run.search(n_best=...))",
            )
        found = [each.text for each in self.translations(as_texts(lines, "line"), config, direction=direction)]
        return found[0] if isinstance(lines, str) else found

    def translations(
        self, lines: Iterable[str], search: SearchConfig | None = None, *, direction: str | None = None
    ) -> Iterator[Translation]:
        """Yield the hypotheses of each line with their scores; lines are read a window ahead. A single text is one line."""
        search, lines = search or self.search(), [lines] if isinstance(lines, str) else lines
        lines = (checked_text(line, f"line {number}") for number, line in enumerate(lines, 1))
        prefix = self._tag(direction)
        model = self.reader
        assert isinstance(model, EncoderDecoder)
        return translate_lines(model, SidedTokenizer(self._tokenizers), lines, search, prefix=prefix)

    def search(self, /, **options: Any) -> SearchConfig:
        """The run's search options, overridden by these; if they choose another method, those of the run's own are dropped."""
        own = {**table_of(self.config.search), "n_best": 1}
        return build(SearchConfig, override(SearchConfig, own, options), "search")

    @property
    def _tokenizers(self) -> Tokenizers:
        return cast("Tokenizers", self.tokenizer)

    def _tag(self, direction: str | None) -> list[int]:
        """The prefix of each source: the tag of the target language if the run has several directions."""
        directions = self.config.data.directions
        if direction is not None and direction not in directions:
            raise unknown(direction, directions, kind="direction")
        if len(directions) == 1:
            return []
        if direction is None:
            raise OptionError("the run has several directions", fix=f"choose one: {hints.argument('direction', directions[0])}")
        return [self._tokenizers.source.tag_id(Direction.parse(direction).target)]
