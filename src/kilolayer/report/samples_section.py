"""The part of the page with samples: what a model made of a few texts, with the words that differ from what was asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher

from kilolayer.report.record import Entry, Record

SHOWN, OPEN = 30, 5
"""Samples on the page, and how many of them are not folded."""
LONGEST = 2000
"""Words of a text that are compared: the time grows with their square."""


@dataclass(frozen=True)
class Piece:
    """A stretch of a text; differs: it is not in the other text of its sample."""

    text: str
    differs: bool = False


@dataclass(frozen=True)
class SamplePart:
    """One text of a sample, such as its source."""

    kind: str
    title: str
    pieces: list[Piece]


@dataclass(frozen=True)
class Samples:
    """The first samples of a run, those that are folded away, and how many more there are; marked: a word is anywhere."""

    title: str
    blocks: list[list[SamplePart]]
    folded: list[list[SamplePart]]
    left_out: int
    marked: bool


def samples_section(record: Record) -> Samples:
    """With the titles that the task gives them, where it is known."""
    known = None if record.task is None else record.task.samples
    compared = None if known is None else known.compared

    def parts(sample: Entry) -> Mapping[str, str]:
        return known.parts if known is not None else {kind: kind for kind in sample}

    blocks: list[list[SamplePart]] = []
    for sample in record.samples[:SHOWN]:
        texts = {kind: str(sample[kind]) for kind in parts(sample) if sample.get(kind) is not None}
        pieces = {kind: [Piece(text)] for kind, text in texts.items()}
        if compared is not None and set(compared) <= set(texts):
            pieces |= dict(zip(compared, differing(*(texts[kind] for kind in compared)), strict=True))
        blocks.append([SamplePart(kind, parts(sample)[kind], found) for kind, found in pieces.items()])
    title = "Samples" if known is None else known.title
    marked = any(piece.differs for block in blocks for part in block for piece in part.pieces)
    return Samples(title, blocks[:OPEN], blocks[OPEN:], max(0, len(record.samples) - SHOWN), marked)


def differing(wanted: str, found: str) -> tuple[list[Piece], list[Piece]]:
    """Both texts in pieces: the words that they share in their order, and those that one of them has alone."""
    sides = [re.findall(r"\s+|\S+", text) for text in (wanted, found)]
    if max(map(len, sides)) > 2 * LONGEST:
        return [Piece(wanted)], [Piece(found)]
    shared: tuple[set[int], set[int]] = (set(), set())
    places = [[place for place, word in enumerate(side) if not word.isspace()] for side in sides]
    words = [[side[place] for place in own] for side, own in zip(sides, places, strict=True)]
    for block in SequenceMatcher(None, *words, autojunk=False).get_matching_blocks():
        shared[0].update(places[0][block.a : block.a + block.size])
        shared[1].update(places[1][block.b : block.b + block.size])
    first, second = (
        [Piece(word, not word.isspace() and place not in own) for place, word in enumerate(side)]
        for side, own in zip(sides, shared, strict=True)
    )
    return _joined(first), _joined(second)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind as one piece."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].differs == piece.differs:
            joined[-1] = Piece(joined[-1].text + piece.text, piece.differs)
        else:
            joined.append(piece)
    return joined
