"""Vocabularies that lose nothing: what is encoded comes back, and every byte is counted."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from kilolayer.data.byte_pieces import BytePieceVocabulary
from kilolayer.data.documents import TextPart
from kilolayer.data.grammar import pairs
from kilolayer.data.tokenizer import TokenizerConfig, short_parts, train_tokenizer
from kilolayer.data.vocabulary import ByteVocabulary, PieceVocabulary, TextVocabulary, load_vocabulary, vocabulary_for
from kilolayer.errors import InputError, OptionError

CONFIG = TokenizerConfig(vocab_size=340, normalization="identity")
STRANGE = [
    "",
    " ",
    "\n\n",
    "  two  spaces  ",
    "tab\t\r\n",
    "\u2581",
    "a\u2581 \u2581b",
    "<s> </s> <0x41> <pad> \u2047",
    "\ufeffmark \u2028 \x00",
    "\ufb01 \u00bd e\u0301",
    "日本 \U0001f600",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextPart:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(english for english, _ in pairs(300, seed=1, unseen=False)))
    return TextPart((path,))


@pytest.fixture(scope="module", params=["unigram", "bpe", "byte_bpe", "bytes"])
def vocabulary(request: pytest.FixtureRequest, text: TextPart, tmp_path_factory: pytest.TempPathFactory) -> TextVocabulary:
    config = (
        TokenizerConfig(kind="bytes")
        if request.param == "bytes"
        else TokenizerConfig(kind=request.param, vocab_size=340, normalization="identity")
    )
    return vocabulary_for(text, config, tmp_path_factory.mktemp("cache"))


@pytest.mark.matrix(2)
def test_text_comes_back_and_its_bytes_are_counted(vocabulary: TextVocabulary) -> None:
    dice = random.Random(0)
    ranges = [(1, 128), (128, 0xD800), (0xE000, 0x110000), (0x2580, 0x2583)]
    chaos = ["".join(chr(dice.randrange(*dice.choice(ranges))) for _ in range(dice.randrange(30))) for _ in range(500)]
    for sample in [*STRANGE, *chaos, "The dog sees the cat.\n" * 3]:
        ids = vocabulary.encode(sample.encode())
        assert vocabulary.decode(ids.tolist()) == sample
        assert vocabulary.byte_lengths[ids].sum() == len(sample.encode())
        assert not len(ids) or 4 <= ids.min() <= ids.max() < vocabulary.vocab_size
    assert not vocabulary.byte_lengths[:4].any()


def test_text_may_be_encoded_line_by_line(vocabulary: TextVocabulary, text: TextPart) -> None:
    whole = text.files[0].read_bytes()
    lines = [vocabulary.encode(line) for line in whole.splitlines(keepends=True)]
    assert np.array_equal(np.concatenate(lines), vocabulary.encode(whole))


def test_special_tokens_and_broken_bytes_decode_to_something(vocabulary: TextVocabulary) -> None:
    assert vocabulary.decode([0, 2, 3, 3]) == ""
    for byte in (0x80, 0xC3, 0xF0, 0xFF):
        token = vocabulary.tokenizer.byte_id(byte) if vocabulary.utf8 else int(vocabulary.encode(bytes([byte]))[0])  # type: ignore
        assert vocabulary.decode([token]) == "\ufffd"
    dice = random.Random(1)
    for _ in range(200):
        vocabulary.decode([dice.randrange(vocabulary.vocab_size) for _ in range(20)]).encode()


def test_bytes_are_tokens() -> None:
    vocabulary = ByteVocabulary()
    assert vocabulary.vocab_size == 260
    assert vocabulary.encode(b"\x00a\xff").tolist() == [4, 101, 259]
    assert vocabulary.decode([101, 0, 102]) == "ab"


def test_a_run_keeps_its_vocabulary(vocabulary: TextVocabulary, tmp_path: Path) -> None:
    vocabulary.save(tmp_path)
    kinds = {ByteVocabulary: "bytes", BytePieceVocabulary: "byte_bpe", PieceVocabulary: "unigram"}
    loaded = load_vocabulary(tmp_path, TokenizerConfig(kind=kinds[type(vocabulary)]))  # pyright: ignore
    assert (loaded.digest, loaded.vocab_size) == (vocabulary.digest, vocabulary.vocab_size)
    assert len(list(tmp_path.iterdir())) == (vocabulary.vocab_size != 260)


def test_only_the_part_that_is_trained_on_makes_the_vocabulary(text: TextPart, tmp_path: Path) -> None:
    start = text.files[0].stat().st_size
    longer = tmp_path / "longer.txt"
    longer.write_bytes(text.files[0].read_bytes() + b"\nzebra zebra zebra quartz quartz" * 50)
    whole = vocabulary_for(text, CONFIG, tmp_path / "cache")
    part = vocabulary_for(TextPart((longer,), 0, start), CONFIG, tmp_path / "cache")
    assert part.digest == whole.digest
    assert vocabulary_for(TextPart((longer,)), CONFIG, tmp_path / "cache").digest != whole.digest


def test_a_vocabulary_that_loses_something_is_refused(text: TextPart, tmp_path: Path) -> None:
    lines = text.files[0].read_text().splitlines()
    for number, config in enumerate([TokenizerConfig(vocab_size=340), TokenizerConfig(vocab_size=90, byte_fallback=False)]):
        path = tmp_path / f"{number}.model"
        path.write_bytes(train_tokenizer(lines, config))
        with pytest.raises(InputError, match="restore the text exactly") as caught:
            vocabulary_for(text, TokenizerConfig(path=str(path)), tmp_path / "cache")
        assert caught.value.where == str(path)
        assert "--add_dummy_prefix=false" in caught.value.fix


def test_long_lines_are_cut_for_the_training_of_a_vocabulary() -> None:
    dice = random.Random(0)
    for line in ("", "short", "x" * 5000, " ".join("y" * dice.randrange(1, 300) for _ in range(200)), " " * 4000):
        parts = short_parts(line)
        assert "".join(parts) == line
        assert all(0 < len(part) <= 1000 for part in parts)


def test_options_without_effect_on_bytes_are_refused() -> None:
    with pytest.raises(OptionError, match="vocab_size has no effect on bytes"):
        TokenizerConfig(kind="bytes", vocab_size=300)
