"""From text to token files: tags, ends, and filters that count every pair."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilolayer.data.corpora import DataConfig, Direction, ParallelText, find_corpora
from kilolayer.data.encode import encode_text, encode_training
from kilolayer.data.filters import FilterConfig, FilterReport, Seen
from kilolayer.data.tokenizer import Tokenizer, TokenizerConfig, Tokenizers, train_tokenizer
from kilolayer.errors import InputError

WORDS = ["the", "a", "red", "green", "old", "small", "house", "tree", "dog", "bird", "sees", "likes", "finds"]
LINES = [f"{a} {b} {c} {d}" for a in WORDS for b in WORDS[:3] for c in WORDS[3:6] for d in WORDS[6:8]]
BOTH = Tokenizer(
    train_tokenizer(LINES, TokenizerConfig(kind="bpe", vocab_size=300, character_coverage=1.0), ["<2de>", "<2en>", "<bt>"])
)
TOKENIZERS = Tokenizers(BOTH, BOTH)


def parallel(folder: Path, sources: list[str], targets: list[str], synthetic: bool = False) -> ParallelText:
    for language, lines in (("en", sources), ("de", targets)):
        (folder / f"train.{language}").write_bytes("".join(line + "\n" for line in lines).encode())
    return ParallelText((folder / "train.en", folder / "train.de"), Direction("en", "de"), len(sources), (), synthetic)


@pytest.mark.parametrize(("tagged", "synthetic"), [(False, False), (True, False), (False, True), (True, True)])
def test_sequences_have_tags_and_ends(tmp_path: Path, tagged: bool, synthetic: bool) -> None:
    text = parallel(tmp_path, ["the red dog", ""], ["a bird", "x"], synthetic)
    pairs = encode_text(text, TOKENIZERS, tmp_path / "cache", tagged=tagged)
    source, target = BOTH.encode(["the red dog", "a bird"])
    prefix = [BOTH.tag_id("de")] * tagged + [BOTH.synthetic_id] * synthetic
    assert pairs.source(0).tolist() == [*prefix, *source, 3]
    assert pairs.target(0).tolist() == [*target, 3]
    assert pairs.source(1).tolist() == [*prefix, 3]  # nothing is left out of text that is not for training
    assert pairs.report == FilterReport(read=2, kept=2)


def test_filters_count_what_they_remove(tmp_path: Path) -> None:
    rows = [
        ("the dog", "the bird"),
        ("the dog", "the bird"),  # duplicate
        ("the dog", "a bird"),
        ("", "a bird"),  # empty
        ("a bird", " \u2003\t"),  # empty
        ("a bird", "\u200b\u0007"),  # nothing that has a token
        ("the dog " * 100, "the bird " * 100),  # too long
        ("dog", "the dog " * 8),  # ratio
    ]
    text = parallel(tmp_path, [source for source, _ in rows], [target for _, target in rows])
    config = FilterConfig(max_tokens=100, max_ratio=5)
    pairs = encode_text(text, TOKENIZERS, tmp_path / "cache", tagged=False, filters=config)
    assert pairs.report == FilterReport(read=8, kept=2, empty=3, duplicate=1, too_long=1, ratio=1)
    assert str(pairs.report) == "kept 2 of 8 pairs (removed: empty 3, duplicates 1, too long 1, length ratio 1)"
    assert len(pairs) == 2
    loose = FilterConfig(max_tokens=2000, max_ratio=0, duplicates=True)
    assert encode_text(text, TOKENIZERS, tmp_path / "cache", tagged=False, filters=loose).report.kept == 5


@pytest.mark.slow
def test_a_line_of_ten_megabytes_is_counted_as_too_long(tmp_path: Path) -> None:
    text = parallel(tmp_path, ["the dog", "x" * 10_000_000, "a bird"], ["the dog", "x", "a bird"])
    pairs = encode_text(text, TOKENIZERS, tmp_path / "cache", tagged=False, filters=FilterConfig())
    assert pairs.report == FilterReport(read=3, kept=2, too_long=1)


def test_reports_add_up() -> None:
    assert FilterReport(read=2, kept=1, empty=1) + FilterReport(read=3, kept=3) == FilterReport(read=5, kept=4, empty=1)


def test_nothing_left_is_refused(tmp_path: Path) -> None:
    text = parallel(tmp_path, ["the dog"], [""])
    with pytest.raises(InputError, match=r"every target is empty\n.*train\.de"):
        encode_text(text, TOKENIZERS, tmp_path / "cache", tagged=False, filters=FilterConfig())


def test_token_files_are_kept_by_content(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    text = parallel(tmp_path, LINES, LINES)
    first = encode_text(text, TOKENIZERS, cache, tagged=False, filters=FilterConfig())
    before = (first.folder / "tokens.bin").stat().st_mtime_ns
    again = encode_text(text, TOKENIZERS, cache, tagged=False, filters=FilterConfig())
    assert again.folder == first.folder
    assert (again.folder / "tokens.bin").stat().st_mtime_ns == before
    assert again.report == first.report
    others = [
        encode_text(text, TOKENIZERS, cache, tagged=True, filters=FilterConfig()),
        encode_text(text, TOKENIZERS, cache, tagged=False, filters=FilterConfig(max_tokens=99)),
        encode_text(text, TOKENIZERS, cache, tagged=False),
        encode_text(parallel(tmp_path, LINES[1:], LINES[1:]), TOKENIZERS, cache, tagged=False, filters=FilterConfig()),
    ]
    assert len({first.folder, *(each.folder for each in others)}) == 5


def test_damaged_token_files_are_made_again(tmp_path: Path) -> None:
    text = parallel(tmp_path, LINES, LINES)
    folder = encode_text(text, TOKENIZERS, tmp_path / "cache", tagged=False).folder
    whole = (folder / "tokens.bin").read_bytes()
    (folder / "tokens.bin").write_bytes(b"\x07" + whole[1:])
    again = encode_text(text, TOKENIZERS, tmp_path / "cache", tagged=False)
    assert (again.folder / "tokens.bin").read_bytes() == whole


def test_bad_utf8_stops_before_anything_is_kept(tmp_path: Path) -> None:
    text = parallel(tmp_path, ["the dog", "x"], ["a", "b"])
    (tmp_path / "train.de").write_bytes(b"a\nb\xff\n")
    with pytest.raises(InputError, match="line 2, byte 2"):
        encode_text(text, TOKENIZERS, tmp_path / "cache", tagged=False)
    assert list((tmp_path / "cache").iterdir()) == []


def test_four_column_text_to_tokens(tmp_path: Path) -> None:
    (tmp_path / "all.tsv").write_text("de\ten\tder Hund\tthe dog\nen\tde\tthe bird\tein Vogel\n")
    config = DataConfig(folder=str(tmp_path), train=["all"], directions=["en-de", "de-en"])
    corpora = find_corpora(config, tmp_path / "cache")
    english, german = (encode_text(text, TOKENIZERS, tmp_path / "cache", tagged=True) for text in corpora.train)
    assert BOTH.decode([english.source(0), english.target(1), german.source(1)]) == ["the dog", "ein Vogel", "ein Vogel"]
    assert [english.source(0)[0], german.source(0)[0]] == [BOTH.tag_id("de"), BOTH.tag_id("en")]


def test_training_text_becomes_one_mixture(tmp_path: Path) -> None:
    for name, lines in {"train.en": LINES, "train.de": LINES, "bt.en": LINES[:9], "bt.de": LINES[:9]}.items():
        (tmp_path / name).write_text("\n".join(lines))
    (tmp_path / "data.toml").write_text(
        'directions = ["en-de", "de-en"]\n[[train]]\nfiles = "train"\nupsample = 2\n'
        '[[train]]\nfiles = "bt"\nsynthetic = true\ndirections = ["en-de"]\n'
    )
    config = DataConfig(manifest=str(tmp_path / "data.toml"))
    mixture = encode_training(find_corpora(config), TOKENIZERS, config, tmp_path / "cache")
    assert mixture.quotas == [2 * len(LINES), 2 * len(LINES), 9]
    assert mixture.report == FilterReport(read=2 * len(LINES) + 9, kept=2 * len(LINES) + 9)
    prefixes = [part.pairs.source(0)[:2].tolist() for part in mixture.parts]
    assert prefixes[2] == [BOTH.tag_id("de"), BOTH.synthetic_id]
    assert prefixes[1] == [BOTH.tag_id("en"), BOTH.encode([LINES[0]])[0][0]]


@given(st.lists(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("abcdefgh")), max_size=30), max_size=6))
@settings(deadline=None)
def test_seen_is_a_set(chunks: list[list[tuple[str, str]]]) -> None:
    seen, known = Seen(sum(map(len, chunks))), set[tuple[str, str]]()
    for chunk in chunks:
        expected = []
        for pair in chunk:
            expected.append(pair not in known)
            known.add(pair)
        assert seen.add(chunk).tolist() == expected


def test_seen_when_full() -> None:
    seen = Seen(3000)
    pairs = [(str(i), "x") for i in range(2990)]
    assert all(seen.add(pairs[start : start + 100]).all() for start in range(0, 2990, 100))
    assert not seen.add(pairs[:10]).any()
    with pytest.raises(InputError, match="more pairs than when it was counted"):
        seen.add([("another", "y")])
