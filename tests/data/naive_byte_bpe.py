"""GPT-2's tokenizer as loops, by Python's own Unicode tables."""

from __future__ import annotations

import unicodedata
from itertools import pairwise

CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")


def kind_of(character: str) -> str:
    """White space, letter, number, or none of them."""
    if character.isspace() and character not in "\x1c\x1d\x1e\x1f":  # which Unicode does not count
        return "space"
    return {"L": "letter", "N": "number"}.get(unicodedata.category(character)[0], "other")


def words(text: str) -> list[str]:
    """Contractions; a run of one kind with a space before it; white space, whose last character goes to what follows."""
    found, place = [], 0
    while place < len(text):
        contraction = next((each for each in CONTRACTIONS if text.startswith(each, place)), None)
        if contraction is not None:
            end = place + len(contraction)
        else:
            start = place + (text[place] == " " and place + 1 < len(text) and kind_of(text[place + 1]) != "space")
            end = start
            while end < len(text) and kind_of(text[end]) == kind_of(text[start]):
                end += 1
            if kind_of(text[start]) == "space" and end < len(text) and end - place > 1:
                end -= 1
        found.append(text[place:end])
        place = end
    return found


def pieces(word: bytes, ranks: dict[tuple[bytes, bytes], int]) -> list[bytes]:
    """Bytes, of which the pair of the lowest rank is joined, everywhere, until no pair has a rank."""
    parts = [bytes([byte]) for byte in word]
    while pairs := [pair for pair in pairwise(parts) if pair in ranks]:
        best, joined = min(pairs, key=ranks.__getitem__), []
        while parts:
            width = 2 if tuple(parts[:2]) == best else 1
            joined.append(b"".join(parts[:width]))
            parts = parts[width:]
        parts = joined
    return parts
