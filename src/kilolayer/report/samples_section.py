"""The samples section of the report: the model's outputs for a few texts, with words marked that differ from the reference."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher

from kilolayer.report.record import Entry, Record

SHOWN, OPEN = 30, 5
"""Number of samples on the page, and how many of them are not collapsed."""
PICTURE = re.compile(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/]+={0,2}")
OPEN_PICTURES = 12
LONGEST = 2000
"""Maximum number of words that are compared, since the time is quadratic."""


@dataclass(frozen=True)
class Piece:
    """A part of a text. differs: whether it is missing from the other text of its sample."""

    text: str
    differs: bool = False


@dataclass(frozen=True)
class SamplePart:
    """One text of a sample, such as its source; or a picture, whose text is a data URI."""

    kind: str
    title: str
    pieces: list[Piece]

    @property
    def picture(self) -> str | None:
        """The data URI, if it is one of an image."""
        text = "".join(piece.text for piece in self.pieces)
        return text if PICTURE.fullmatch(text) else None


@dataclass(frozen=True)
class Samples:
    """The first samples of a run, the collapsed ones, and how many more there are.

    marked: whether any word is marked. pictured: whether they have pictures.
    """

    title: str
    blocks: list[list[SamplePart]]
    folded: list[list[SamplePart]]
    left_out: int
    marked: bool
    pictured: bool


def samples_section(record: Record) -> Samples:
    """The samples of a run, with the titles that its task gives them, if the task is known."""
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
    pictured = any(part.picture for block in blocks for part in block)
    shown = OPEN_PICTURES if pictured else OPEN
    return Samples(title, blocks[:shown], blocks[shown:], max(0, len(record.samples) - SHOWN), marked, pictured)


def differing(wanted: str, found: str) -> tuple[list[Piece], list[Piece]]:
    """Split both texts into pieces: the words that they have in common, in order, and those that only one of them has."""
    sides = [re.findall(r"\s+|\S+", text) for text in (wanted, found)]
    if max(map(len, sides)) > 2 * LONGEST:
        return [Piece(wanted)], [Piece(found)]
    shared: tuple[set[int], set[int]] = (set(), set())
    indices = [[index for index, word in enumerate(side) if not word.isspace()] for side in sides]
    words = [[side[index] for index in own] for side, own in zip(sides, indices, strict=True)]
    for block in SequenceMatcher(None, *words, autojunk=False).get_matching_blocks():
        shared[0].update(indices[0][block.a : block.a + block.size])
        shared[1].update(indices[1][block.b : block.b + block.size])
    first, second = (
        [Piece(word, not word.isspace() and index not in own) for index, word in enumerate(side)]
        for side, own in zip(sides, shared, strict=True)
    )
    return _joined(first), _joined(second)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Merge adjacent pieces of the same kind."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].differs == piece.differs:
            joined[-1] = Piece(joined[-1].text + piece.text, piece.differs)
        else:
            joined.append(piece)
    return joined
