"""Translate lines of text: one translation per line, in order, for any input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from kilolayer.errors import OptionError
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.hypothesis import Hypothesis
from kilolayer.generate.search import generate
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.runtime.reader import EOS, PAD
from kilolayer.runtime.runtime import runtime_of

BREAKS = str.maketrans("\r\n", "  ")  # byte fallback can produce them, and they would add lines to the output


class Vocabulary(Protocol):
    """The part of a tokenizer's interface that translation needs."""

    def encode(self, lines: list[str]) -> list[list[int]]: ...
    def decode(self, ids: list[list[int]]) -> list[str]: ...


@dataclass(frozen=True)
class Translation:
    """The translation of a line.

    texts, scores: of the hypotheses, in order; an empty line has one, the empty text.
    cut: whether the line was longer than max_source_length, so that its end was not read.
    """

    texts: list[str]
    scores: list[float]
    cut: bool

    @property
    def text(self) -> str:
        """The first hypothesis."""
        return self.texts[0]


def translate_lines(
    model: EncoderDecoder, tokenizer: Vocabulary, lines: Iterable[str], config: SearchConfig, *, prefix: Sequence[int] = ()
) -> Iterator[Translation]:
    """One translation per line, in order, yielded as soon as its window of lines is done.

    prefix: token ids before every source, such as the tag of the target language. A line without tokens gives the empty text
    and does not reach the model. Line breaks in the output become spaces.
    """
    longest = config.max_source_length
    if model.config.max_length is not None:
        longest = min(longest, model.config.max_length)
    room = longest - len(prefix) - 1
    if room < 1:
        raise OptionError(
            f"max_source_length leaves {room} of {longest} tokens for a line after its tag and end",
            fix="raise max_source_length",
        )
    model = runtime_of(model).decoding_form(model)
    iterator, start = iter(lines), 0
    while window := list(islice(iterator, config.window)):
        encoded = tokenizer.encode(window)
        sources = [[*prefix, *tokens[:room], EOS] if tokens else [] for tokens in encoded]
        found = _search_window(model, sources, config, start)
        texts = iter(tokenizer.decode([each.tokens for hypotheses in found for each in hypotheses]))
        for tokens, hypotheses in zip(encoded, found, strict=True):
            answers = [next(texts).translate(BREAKS) for _ in hypotheses]
            yield Translation(answers or [""], [each.score for each in hypotheses] or [0.0], cut=len(tokens) > room)
        start += len(window)


def _search_window(model: EncoderDecoder, sources: list[list[int]], config: SearchConfig, start: int) -> list[list[Hypothesis]]:
    """The hypotheses of each source, none for an empty one; sources of similar length are decoded together."""
    device = next(model.parameters()).device
    found: list[list[Hypothesis]] = [[] for _ in sources]
    for rows in _batches([len(source) for source in sources], config.batch_tokens // config.width):
        batch = _padded([sources[row] for row in rows]).to(device)
        for row, hypotheses in zip(rows, generate(model, batch, config, indices=[start + row for row in rows]), strict=True):
            found[row] = hypotheses
    return found


def _batches(lengths: list[int], most_tokens: int) -> Iterator[list[int]]:
    """Indices of nonempty sources, longest first, in batches of at most `most_tokens` tokens, padding included."""
    rows = sorted((row for row, length in enumerate(lengths) if length), key=lambda row: -lengths[row])
    while rows:
        count = max(1, most_tokens // lengths[rows[0]])
        yield rows[:count]
        rows = rows[count:]


def _padded(sources: list[list[int]]) -> Tensor:
    width = max(map(len, sources))
    return torch.tensor([source + [PAD] * (width - len(source)) for source in sources])
