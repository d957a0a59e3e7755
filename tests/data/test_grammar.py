"""The embedded corpus: right German, nothing of the test part in training, the same text every time."""

from __future__ import annotations

import hashlib
import random
import re
from pathlib import Path

import pytest

from kilolayer.data import grammar
from kilolayer.data.grammar import ACTORS, THINGS, Clause, Phrase, clause, held_out, pairs, sentence, write_corpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus")
    write_corpus(path)
    return path


def lines(folder: Path, name: str) -> list[str]:
    return (folder / name).read_text(encoding="utf-8").splitlines()


def test_sizes_and_alignment(folder: Path) -> None:
    for part, least in (("train", 20_000), ("valid", 100), ("test", 500)):
        english, german = lines(folder, f"{part}.en"), lines(folder, f"{part}.de")
        assert len(english) == len(german) >= least
        assert len(set(english)) == len(english)


def test_no_test_sentence_is_in_training(folder: Path) -> None:
    assert not set(lines(folder, "test.en")) & (set(lines(folder, "train.en")) | set(lines(folder, "valid.en")))
    assert not set(lines(folder, "valid.en")) & set(lines(folder, "train.en"))


@pytest.mark.slow
def test_every_test_sentence_holds_a_combination_that_training_never_shows() -> None:
    seen: set[str] = set()
    dice = random.Random(1)
    for _ in range(20_000):
        _, _, combinations = sentence(dice)
        if not any(held_out(*each.rsplit(" ", 1)) for each in combinations):
            seen |= combinations
    kept = {each for each in _all_combinations() if held_out(*each.rsplit(" ", 1))}
    assert kept
    assert not seen & kept
    assert 0.05 < len(kept) / len(_all_combinations()) < 0.25


def _all_combinations() -> set[str]:
    dice = random.Random(3)
    return set().union(*(sentence(dice)[2] for _ in range(5000)))


def test_every_word_of_the_test_part_is_known(folder: Path) -> None:
    def words(name: str) -> set[str]:
        return {word.strip(".,").lower() for line in lines(folder, name) for word in line.split()}

    for language in ("en", "de"):
        assert words(f"test.{language}") <= words(f"train.{language}")


def test_the_text_never_changes(folder: Path) -> None:
    digest = hashlib.sha256(
        b"".join((folder / f"{part}.{side}").read_bytes() for part in ("train", "test") for side in ("en", "de"))
    )
    assert digest.hexdigest()[:16] == "5487b920bba94dc7"


# Written by hand from a German grammar: (noun, plural, definite, adjective) and the phrase in three cases.
PHRASES = [
    ("man", False, True, "old", ("der alte Mann", "den alten Mann", "dem alten Mann")),
    ("man", False, False, "old", ("ein alter Mann", "einen alten Mann", "einem alten Mann")),
    ("woman", False, True, "small", ("die kleine Frau", "die kleine Frau", "der kleinen Frau")),
    ("woman", False, False, "small", ("eine kleine Frau", "eine kleine Frau", "einer kleinen Frau")),
    ("child", False, True, "good", ("das gute Kind", "das gute Kind", "dem guten Kind")),
    ("child", False, False, "good", ("ein gutes Kind", "ein gutes Kind", "einem guten Kind")),
    ("dog", True, True, "red", ("die roten Hunde", "die roten Hunde", "den roten Hunden")),
    ("child", True, True, "", ("die Kinder", "die Kinder", "den Kindern")),
    ("cat", True, True, "new", ("die neuen Katzen", "die neuen Katzen", "den neuen Katzen")),
]


@pytest.mark.parametrize(("noun", "plural", "definite", "adjective", "german"), PHRASES)
def test_noun_phrases_agree(noun: str, plural: bool, definite: bool, adjective: str, german: tuple[str, str, str]) -> None:
    chosen = next(each for each in ACTORS if each.english == noun)
    article = "the" if definite else "an" if (adjective or noun)[0] in "aeiou" else "a"
    english = " ".join(filter(None, [article, adjective, chosen.english_plural if plural else chosen.english]))
    dice = random.Random(0)
    found = next(phrase for phrase in iter(lambda: grammar.noun_phrase(dice, [chosen]), None) if phrase.english == english)
    assert tuple(found.german.values()) == german
    assert found.plural == plural


def test_verbs_find_their_place() -> None:
    dog = Phrase(
        "the dog", {"nominative": "der Hund", "accusative": "den Hund", "dative": "dem Hund"}, False, frozenset(), "dog"
    )
    plain = Clause(dog, "sees", "the cat", "sieht", "die Katze", "", frozenset())
    assert plain.german_second() == "der Hund sieht die Katze"
    assert plain.german_second("heute") == "heute sieht der Hund die Katze"
    assert plain.german_last() == "der Hund die Katze sieht"
    modal = Clause(dog, "can see", "the cat", "kann", "die Katze", "sehen", frozenset())
    assert modal.german_second() == "der Hund kann die Katze sehen"
    assert modal.german_last() == "der Hund die Katze sehen kann"


def test_verbs_agree_with_their_subject() -> None:
    dice = random.Random(5)
    singular = {verb.german for verb in [*grammar.TRANSITIVE, *grammar.INTRANSITIVE, grammar.GIVING]} | {"kann", "muss"}
    for _ in range(500):
        found = clause(dice)
        assert (found.german_finite in singular) == (not found.subject.plural)


def test_giving_takes_a_dative_and_an_accusative() -> None:
    given = [german for english, german in pairs(9000, 7, False) if "gives the man a " in english]
    assert len(given) > 5
    assert all(re.search(r"dem Mann (einen|eine|ein) ", german) for german in given)


def test_the_nouns_are_all_different() -> None:
    nouns = [*ACTORS, *THINGS]
    assert len({each.english for each in nouns}) == len({each.german for each in nouns}) == len(nouns)
