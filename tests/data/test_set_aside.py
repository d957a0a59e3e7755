"""Validation and test sets that are taken from the training text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kilolayer.config import build, override
from kilolayer.data.corpora import Corpora, DataConfig, find_corpora
from kilolayer.data.grammar import pairs as grammar
from kilolayer.data.parallel import Pair, ParallelText
from kilolayer.errors import InputError, OptionError

SHARES = {"valid_share": 0.1, "test_share": 0.2}
PAIRS = [(f"source {number}", f"Ziel {number}") for number in range(1000)]


def write(folder: Path, pairs: list[Pair], stem: str = "text", languages: tuple[str, str] = ("en", "de")) -> None:
    for language, lines in zip(languages, zip(*pairs, strict=True), strict=True):
        (folder / f"{stem}.{language}").write_bytes("".join(f"{line}\n" for line in lines).encode())


def corpora_of(folder: Path, **options: Any) -> Corpora:
    config = DataConfig(**{"folder": str(folder), "train": ["text"], "directions": ["en-de"], **SHARES, **options})
    return find_corpora(config, folder / "cache")


def pairs_of(texts: list[ParallelText], direction: str = "en-de") -> list[Pair]:
    return [pair for text in texts if text.direction.name == direction for pair in text.pairs()]


def test_shares_of_one_corpus_are_about_as_large_as_asked_for_and_keep_its_order(tmp_path: Path) -> None:
    write(tmp_path, PAIRS)
    found = corpora_of(tmp_path)
    parts = [pairs_of(texts) for texts in (found.train, found.valid, found.test)]
    assert sorted(pair for part in parts for pair in part) == sorted(PAIRS)
    for part, share in zip(parts, (0.7, 0.1, 0.2), strict=True):
        assert abs(len(part) / 1000 - share) < 0.05
        assert part == [pair for pair in PAIRS if pair in set(part)]
    assert [text.size for texts in (found.train, found.valid, found.test) for text in texts] == [len(part) for part in parts]


def test_text_that_is_added_moves_no_pair(tmp_path: Path) -> None:
    write(tmp_path, PAIRS[:500])
    few = corpora_of(tmp_path)
    write(tmp_path, PAIRS)
    many = corpora_of(tmp_path)
    for before, after in ((few.train, many.train), (few.valid, many.valid), (few.test, many.test)):
        assert [pair for pair in pairs_of(after) if pair in PAIRS[:500]] == pairs_of(before)


def test_no_sentence_of_either_side_is_in_two_parts(tmp_path: Path) -> None:
    """The grammar has few words, so that sentences repeat on both sides; some pairs differ in their spaces alone."""
    pairs = [(source.split(" ", 1)[-1], target) for source, target in grammar(2000, seed=1, unseen=False)]
    write(tmp_path, [*pairs, *((f" {source}", target.replace(" ", "  ")) for source, target in pairs[:300])])
    found = corpora_of(tmp_path)
    parts = [pairs_of(texts) for texts in (found.train, found.valid, found.test)]
    assert all(parts)
    for side in (0, 1):
        sentences = [{" ".join(pair[side].split()) for pair in part} for part in parts]
        assert len(set.union(*sentences)) == sum(map(len, sentences))


def test_both_directions_and_all_corpora_are_divided_alike(tmp_path: Path) -> None:
    write(tmp_path, PAIRS)
    write(tmp_path, [(source, f"Autre {source}") for source, _ in PAIRS], "more", ("en", "fr"))
    found = corpora_of(tmp_path, train=["text", "more"], directions=["en-de", "de-en", "en-fr"])
    for texts in (found.train, found.valid, found.test):
        assert pairs_of(texts) == [(target, source) for source, target in pairs_of(texts, "de-en")]
    english = [
        {source for name in ("en-de", "en-fr") for source, _ in pairs_of(texts, name)} for texts in (found.valid, found.test)
    ]
    assert not english[0] & english[1]
    assert not (english[0] | english[1]) & {source for source, _ in pairs_of(found.train, "en-fr")}


def test_a_sentence_with_many_translations_is_set_aside_with_all_of_them(tmp_path: Path) -> None:
    """No more of the text is lost to training with several languages than with one, whatever their names."""
    languages = ("ab", "cd", "de", "fr", "zz")
    for language in languages:
        write(tmp_path, [(source, f"{language} {source}") for source, _ in PAIRS], "text", ("en", language))
    directions = [direction for each in languages for direction in (f"en-{each}", f"{each}-en")]
    found = corpora_of(tmp_path, directions=directions)
    for texts in (found.train, found.valid, found.test):
        parts = [[source for source, _ in pairs_of(texts, f"en-{each}")] for each in languages]
        assert all(part == parts[0] for part in parts)
    kept = [len(pairs_of(texts, "en-de")) for texts in (found.train, found.valid, found.test)]
    assert sum(kept) == len(PAIRS)


def test_untranslated_sentences_are_not_set_aside(tmp_path: Path) -> None:
    write(tmp_path, [(source, "" if number % 3 else target) for number, (source, target) in enumerate(PAIRS)])
    found = corpora_of(tmp_path)
    assert all(target for texts in (found.valid, found.test) for _, target in pairs_of(texts))
    assert sum(not target for _, target in pairs_of(found.train)) == sum(number % 3 > 0 for number in range(len(PAIRS)))


def test_back_translations_are_only_trained_on_and_not_on_what_is_set_aside(tmp_path: Path) -> None:
    write(tmp_path, PAIRS)
    write(tmp_path, [(f"made {target}", target) for _, target in PAIRS], "bt")
    found = corpora_of(tmp_path, synthetic=["bt"], upsample=3)
    real, made = found.train
    assert (made.synthetic, real.upsample) == (True, 3)
    assert {target for _, target in made.pairs()} == {target for _, target in real.pairs()}
    assert not any(text.synthetic or text.upsample != 1 for text in (*found.valid, *found.test))


def test_one_share_beside_a_file(tmp_path: Path) -> None:
    write(tmp_path, PAIRS)
    write(tmp_path, [("a", "A")], "news")
    found = corpora_of(tmp_path, test_share=0.0, test="news")
    assert pairs_of(found.test) == [("a", "A")]
    assert len(pairs_of(found.train)) + len(pairs_of(found.valid)) == 1000


def test_a_table_of_columns_is_divided_too(tmp_path: Path) -> None:
    (tmp_path / "text.tsv").write_text("".join(f"de\ten\t{target}\t{source}\n" for source, target in PAIRS))
    found = corpora_of(tmp_path)
    assert sorted(pair for texts in (found.train, found.valid, found.test) for pair in pairs_of(texts)) == sorted(PAIRS)


def test_a_part_that_would_be_empty_is_refused(tmp_path: Path) -> None:
    write(tmp_path, PAIRS[:2])
    with pytest.raises(InputError, match=r"set is empty: of 2 pairs of en-de[\s\S]*give more text, or change data.valid_share"):
        corpora_of(tmp_path, valid_share=1e-6, test_share=0.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"valid": "val", "valid_share": 0.1}, "valid and valid_share are both given"),
        ({"valid_share": 0.6, "test_share": 0.5}, "leave nothing to train on"),
        ({"manifest": "m.toml", "test_share": 0.5}, "test_share has no effect with a manifest"),
        ({"valid_share": 1.0}, "valid_share must be"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        build(DataConfig, options)


def test_a_share_that_is_typed_takes_the_place_of_a_file() -> None:
    assert override(DataConfig, {"valid": "val"}, {"valid_share": 0.1}) == {"valid_share": 0.1}


@pytest.mark.parametrize("given", ["text", ["text"]])
def test_one_stem_needs_no_brackets(given: str | list[str]) -> None:
    assert DataConfig(train=given).train == build(DataConfig, {"train": given}).train == ["text"]  # pyright: ignore[reportArgumentType]
