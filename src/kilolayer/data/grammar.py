"""The embedded corpus: English and German by a small bilingual grammar of our own.

German has what English lacks: three genders, case on articles and adjectives, the verb in second place in a main clause and
last after "weil", infinitives at the end. A translator of these sentences has learned agreement and order, not a word list.

Some combinations of words (an adjective with a noun, a verb with its object) are kept out of the training part; every sentence
of the test part holds at least one of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from zlib import crc32

Gender = Literal["m", "f", "n"]
Case = Literal["nominative", "accusative", "dative"]
Pair = tuple[str, str]

HELD_OUT = 8  # one combination of words in this many is kept for the test part
TRAIN_PAIRS, TEST_PAIRS = 30_000, 600


@dataclass(frozen=True)
class Noun:
    """A noun in both languages, singular and plural, with its German gender."""

    english: str
    english_plural: str
    german: str
    german_plural: str
    gender: Gender
    german_dative_plural: str


@dataclass(frozen=True)
class Verb:
    """A verb in both languages: third person singular, and the form of plural and infinitive."""

    english: str
    english_base: str
    german: str
    german_base: str


@dataclass(frozen=True)
class Phrase:
    """A noun phrase: English text, and German text by case."""

    english: str
    german: dict[Case, str]
    plural: bool
    combinations: frozenset[str]
    head: str


def noun(english: str, plural: str, german: str, german_plural: str, gender: Gender) -> Noun:
    """A noun whose dative plural follows the rule: an n, unless there is one."""
    dative = german_plural if german_plural.endswith("n") else german_plural + "n"
    return Noun(english, plural, german, german_plural, gender, dative)


ACTORS = [
    noun("man", "men", "Mann", "Männer", "m"),
    noun("woman", "women", "Frau", "Frauen", "f"),
    noun("child", "children", "Kind", "Kinder", "n"),
    noun("dog", "dogs", "Hund", "Hunde", "m"),
    noun("cat", "cats", "Katze", "Katzen", "f"),
    noun("horse", "horses", "Pferd", "Pferde", "n"),
]
THINGS = [
    noun("book", "books", "Buch", "Bücher", "n"),
    noun("ball", "balls", "Ball", "Bälle", "m"),
    noun("flower", "flowers", "Blume", "Blumen", "f"),
    noun("letter", "letters", "Brief", "Briefe", "m"),
    noun("picture", "pictures", "Bild", "Bilder", "n"),
    noun("lamp", "lamps", "Lampe", "Lampen", "f"),
]
PLACES = {"in the garden": "im Garten", "in the house": "im Haus", "in the city": "in der Stadt", "at school": "in der Schule"}
ADJECTIVES = {"small": "klein", "old": "alt", "red": "rot", "new": "neu", "good": "gut"}
TRANSITIVE = [
    Verb("sees", "see", "sieht", "sehen"),
    Verb("buys", "buy", "kauft", "kaufen"),
    Verb("finds", "find", "findet", "finden"),
    Verb("paints", "paint", "malt", "malen"),
    Verb("looks for", "look for", "sucht", "suchen"),
]
GIVING = Verb("gives", "give", "gibt", "geben")
INTRANSITIVE = [
    Verb("sleeps", "sleep", "schläft", "schlafen"),
    Verb("laughs", "laugh", "lacht", "lachen"),
    Verb("works", "work", "arbeitet", "arbeiten"),
]
MODALS = {"can": ("kann", "können"), "must": ("muss", "müssen")}
ADVERBS = {"today": "heute", "now": "jetzt", "often": "oft"}

THE: dict[Case, dict[str, str]] = {
    "nominative": {"m": "der", "f": "die", "n": "das", "plural": "die"},
    "accusative": {"m": "den", "f": "die", "n": "das", "plural": "die"},
    "dative": {"m": "dem", "f": "der", "n": "dem", "plural": "den"},
}
A: dict[Case, dict[str, str]] = {
    "nominative": {"m": "ein", "f": "eine", "n": "ein"},
    "accusative": {"m": "einen", "f": "eine", "n": "ein"},
    "dative": {"m": "einem", "f": "einer", "n": "einem"},
}
# Endings of an adjective after "der" and after "ein".
WEAK: dict[Case, dict[str, str]] = {
    "nominative": {"m": "e", "f": "e", "n": "e", "plural": "en"},
    "accusative": {"m": "en", "f": "e", "n": "e", "plural": "en"},
    "dative": {"m": "en", "f": "en", "n": "en", "plural": "en"},
}
MIXED: dict[Case, dict[str, str]] = {
    "nominative": {"m": "er", "f": "e", "n": "es"},
    "accusative": {"m": "en", "f": "e", "n": "es"},
    "dative": {"m": "en", "f": "en", "n": "en"},
}


def held_out(first: str, second: str) -> bool:
    """Whether this combination of words is kept for the test part; fixed for ever by the words themselves."""
    return crc32(f"{first} {second}".encode()) % HELD_OUT == 0


def noun_phrase(dice: random.Random, nouns: list[Noun]) -> Phrase:
    """An article, often an adjective, and a noun; singular or plural."""
    chosen = dice.choice(nouns)
    plural = dice.random() < 0.3
    definite = plural or dice.random() < 0.6
    adjective = dice.choice(list(ADJECTIVES)) if dice.random() < 0.5 else ""
    number = "plural" if plural else chosen.gender
    german: dict[Case, str] = {}
    for case in ("nominative", "accusative", "dative"):
        article, ending = (THE, WEAK) if definite else (A, MIXED)
        described = ADJECTIVES[adjective] + ending[case][number] if adjective else ""
        named = chosen.german
        if plural:
            named = chosen.german_dative_plural if case == "dative" else chosen.german_plural
        german[case] = " ".join(filter(None, [article[case][number], described, named]))
    first = adjective or (chosen.english_plural if plural else chosen.english)
    article = "the" if definite else "an" if first[0] in "aeiou" else "a"
    english = " ".join(filter(None, [article, adjective, chosen.english_plural if plural else chosen.english]))
    combinations = {f"{adjective} {chosen.english}"} if adjective else set()
    return Phrase(english, german, plural, frozenset(combinations), chosen.english)


@dataclass(frozen=True)
class Clause:
    """Subject, verb and the rest in both languages, before the verb finds its place."""

    subject: Phrase
    english_verb: str
    english_rest: str
    german_finite: str
    german_rest: str
    german_infinitive: str
    combinations: frozenset[str]

    def english(self) -> str:
        return " ".join(filter(None, [self.subject.english, self.english_verb, self.english_rest]))

    def german_second(self, first: str = "") -> str:
        """The finite verb in second place, behind the subject or behind `first`."""
        subject = self.subject.german["nominative"]
        order = [first, self.german_finite, subject] if first else [subject, self.german_finite]
        return " ".join(filter(None, [*order, self.german_rest, self.german_infinitive]))

    def german_last(self) -> str:
        """The finite verb last, as after "weil"."""
        parts = [self.subject.german["nominative"], self.german_rest, self.german_infinitive, self.german_finite]
        return " ".join(filter(None, parts))


def clause(dice: random.Random) -> Clause:
    """A subject that does something, perhaps with a modal verb, perhaps somewhere."""
    subject = noun_phrase(dice, ACTORS)
    kind = dice.choice(["intransitive", "transitive", "transitive", "giving"])
    combinations = set(subject.combinations)
    english_rest, german_rest = "", ""
    if kind == "intransitive":
        verb = dice.choice(INTRANSITIVE)
    elif kind == "transitive":
        verb = dice.choice(TRANSITIVE)
        thing = noun_phrase(dice, THINGS if dice.random() < 0.7 else ACTORS)
        english_rest, german_rest = thing.english, thing.german["accusative"]
        combinations |= thing.combinations | {f"{verb.english} {thing.head}"}
    else:
        verb, receiver, thing = GIVING, noun_phrase(dice, ACTORS), noun_phrase(dice, THINGS)
        english_rest = f"{receiver.english} {thing.english}"
        german_rest = f"{receiver.german['dative']} {thing.german['accusative']}"
        combinations |= receiver.combinations | thing.combinations | {f"{verb.english} {thing.head}"}
    if dice.random() < 0.25:
        place = dice.choice(list(PLACES))
        english_rest, german_rest = f"{english_rest} {place}".strip(), f"{german_rest} {PLACES[place]}".strip()
        combinations.add(f"{verb.english} {place}")
    plural = subject.plural
    english_verb, finite, infinitive = (
        (verb.english_base if plural else verb.english),
        (verb.german_base if plural else verb.german),
        "",
    )
    if dice.random() < 0.25:
        modal = dice.choice(list(MODALS))
        english_verb, finite, infinitive = f"{modal} {verb.english_base}", MODALS[modal][plural], verb.german_base
    return Clause(subject, english_verb, english_rest, finite, german_rest, infinitive, frozenset(combinations))


def sentence(dice: random.Random) -> tuple[str, str, frozenset[str]]:
    """An English sentence, its German translation, and the combinations of words in it."""
    main = clause(dice)
    kind = dice.choice(["plain", "plain", "adverb", "because"])
    if kind == "adverb":
        adverb = dice.choice(list(ADVERBS))
        return _finish(f"{adverb} {main.english()}", main.german_second(ADVERBS[adverb]), main.combinations)
    if kind == "because":
        reason = clause(dice)
        english, german = (
            f"{main.english()} because {reason.english()}",
            f"{main.german_second()}, weil {reason.german_last()}",
        )
        return _finish(english, german, main.combinations | reason.combinations)
    return _finish(main.english(), main.german_second(), main.combinations)


def _finish(english: str, german: str, combinations: frozenset[str]) -> tuple[str, str, frozenset[str]]:
    return f"{english[0].upper()}{english[1:]}.", f"{german[0].upper()}{german[1:]}.", combinations


def pairs(count: int, seed: int, unseen: bool) -> Iterator[Pair]:
    """`count` different sentence pairs; with `unseen`, each holds a combination that the others never do."""
    dice = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < count:
        english, german, combinations = sentence(dice)
        new = any(held_out(*combination.rsplit(" ", 1)) for combination in combinations)
        if new == unseen and english not in seen:
            seen.add(english)
            yield english, german


def write_corpus(folder: Path) -> None:
    """Write train.en, train.de, valid.en, valid.de, test.en and test.de; the same text every time."""
    folder.mkdir(parents=True, exist_ok=True)
    training = list(pairs(TRAIN_PAIRS + 200, seed=1, unseen=False))
    parts = {"train": training[200:], "valid": training[:200], "test": list(pairs(TEST_PAIRS, seed=2, unseen=True))}
    for part, sentences in parts.items():
        for side, language in enumerate(("en", "de")):
            text = "".join(f"{pair[side]}\n" for pair in sentences)
            (folder / f"{part}.{language}").write_text(text, encoding="utf-8")
