"""References, and systems that spoil them by a known amount: text whose scores differ as much as a test wants."""

from __future__ import annotations

import random

WORDS = [
    *("der", "die", "das", "kleine", "große", "Hund", "Katze", "Mann", "Frau", "sieht", "jagt", "ruft"),
    *("heute", "im", "Garten", "am", "See", ",", "und", "nicht", "Äpfel"),
]


def references(count: int, seed: int = 0) -> list[str]:
    """Sentences of 4 to 24 words that end in a full stop."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(4, 24))) + "." for _ in range(count)]


def spoiled(lines: list[str], rate: float, seed: int) -> list[str]:
    """Each word is replaced, dropped or swapped with its neighbour with the chance `rate`."""
    generator = random.Random(seed)
    return [" ".join(_spoil(line.split(), rate, generator)) for line in lines]


def _spoil(words: list[str], rate: float, generator: random.Random) -> list[str]:
    kept: list[str] = []
    for word in words:
        fate = generator.random() / rate
        if fate < 0.5:
            kept.append(generator.choice(WORDS))
        elif fate < 0.8 or fate >= 1:
            kept.append(word)
        if 0.5 <= fate < 0.8 and len(kept) > 1:
            kept[-2:] = kept[:-3:-1]
    return kept
