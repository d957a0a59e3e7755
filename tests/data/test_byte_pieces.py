"""Byte-level BPE: GPT-2's tokens, and every byte comes back."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Tokenizer

from kilolayer.data import byte_pieces
from kilolayer.data.byte_piece_files import BYTE_OF
from kilolayer.data.byte_pieces import BytePieceVocabulary, byte_pieces_for
from kilolayer.data.documents import TextPart
from kilolayer.data.grammar import pairs
from kilolayer.data.tokenizer import TokenizerConfig, train_tokenizer
from kilolayer.data.vocabulary import load_vocabulary, vocabulary_for
from kilolayer.errors import InputError, OptionError
from tests.data.naive_byte_bpe import pieces, words

SIZE = 420
ODD = [
    "it's I'll we've they'd",
    "日本語 日本",
    "naïve café",
    "1234 56",
    "\n\n\n",
    "    indented\n        more",
    "... !!!",
    "<|pad|>",
    ".\x1c .\x1c",
]
WORDS = [
    "the",
    " the",
    "it's",
    "'ll",
    " ",
    "\n",
    "  \n\n",
    "\t",
    "123",
    "é",
    "日本",
    "...",
    "\x1c",
    "\x85",
    "\u2028",
    "<|endoftext|>",
]
# A character that this Python does not know yet may be a letter to the library.
KNOWN = st.characters(exclude_categories=("Cs", "Cn"))
TEXTS = st.one_of(st.text(KNOWN, max_size=60), st.lists(st.sampled_from(WORDS), max_size=30).map("".join))
BYTES = st.one_of(
    st.binary(max_size=80),
    st.lists(st.one_of(st.sampled_from([word.encode() for word in WORDS]), st.binary(max_size=3)), max_size=20).map(b"".join),
)


def write_text(path: Path) -> TextPart:
    lines = [english for english, _ in pairs(300, seed=1, unseen=False)]
    path.write_text("\n".join([*lines, *(ODD * 20)]), encoding="utf-8")
    return TextPart((path,))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextPart:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def trained(text: TextPart, tmp_path_factory: pytest.TempPathFactory) -> BytePieceVocabulary:
    config = TokenizerConfig(kind="byte_bpe", vocab_size=SIZE)
    return byte_pieces_for(text, config, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def kept(trained: BytePieceVocabulary, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The tokenizer.json of the trained vocabulary; not to be changed."""
    folder = tmp_path_factory.mktemp("kept")
    trained.save(folder)
    return json.loads((folder / "tokenizer.json").read_text())


@pytest.fixture(scope="module")
def gpt2(kept: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained vocabulary in GPT-2's two files: pieces from 0 on, <|endoftext|> at the end."""
    folder = tmp_path_factory.mktemp("gpt2")
    ids = {piece: token - 4 for piece, token in kept["model"]["vocab"].items() if token >= 4}
    (folder / "vocab.json").write_text(json.dumps({**ids, "<|endoftext|>": len(ids)}))
    merges = "".join(f"{first} {second}\n" for first, second in kept["model"]["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")
    return folder


def test_text_is_cut_as_by_loops_written_out(trained: BytePieceVocabulary, kept: dict[str, Any]) -> None:
    spelled = [tuple(bytes(BYTE_OF[letter] for letter in piece) for piece in merge) for merge in kept["model"]["merges"]]
    ranks = {(first, second): rank for rank, (first, second) in enumerate(spelled)}
    assert len(ranks) == SIZE - 260

    @given(TEXTS)
    @settings(deadline=None, max_examples=100)
    def check(sample: str) -> None:
        expected = [piece for word in words(sample) for piece in pieces(word.encode(), ranks)]
        assert [trained.decode_bytes([token]) for token in trained.encode(sample.encode()).tolist()] == expected

    check()
    written = "".join(ODD * 3)
    assert len(trained.encode(written.encode())) < len(written.encode()) - 20  # so merges had something to do


def test_a_text_in_chunks_has_the_tokens_of_the_whole(trained: BytePieceVocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(sample: str) -> list[int]:
        return trained._library.encode(sample, add_special_tokens=False).ids

    def check(sample: str) -> None:
        assert trained.encode(sample.encode()).tolist() == whole(sample)

    for characters, chunks in ((1, 1), (1, 3), (7, 1024)):
        with monkeypatch.context() as patch:
            patch.setattr(byte_pieces, "CHARACTERS", characters)
            patch.setattr(byte_pieces, "CHUNKS", chunks)
            settings(deadline=None, max_examples=50)(given(TEXTS)(check))()
            assert len(byte_pieces._chunks("the dog sees a cat, and " * 3)) > 3
    for character in map(
        chr, [*range(0x200), 0x1680, 0x180E, *range(0x2000, 0x2070), 0x3000, 0xFEFF, 0x1F600]
    ):  # beside a cut, whatever it is
        for sample in (f"{character} .{character}\n.", f".{character}  {character}\n\n"):
            with monkeypatch.context() as patch:
                patch.setattr(byte_pieces, "CHARACTERS", 1)
                check(sample)


def test_any_bytes_come_back_and_are_counted(trained: BytePieceVocabulary) -> None:
    @given(BYTES)
    @settings(deadline=None, max_examples=150)
    def check(data: bytes) -> None:
        ids = trained.encode(data)
        assert ids.dtype == np.int64
        assert trained.decode_bytes(ids.tolist()) == data
        assert trained.decode(ids.tolist()) == data.decode("utf-8", "replace")
        assert trained.byte_lengths[ids].sum() == len(data)
        assert not len(ids) or 4 <= ids.min() <= ids.max() < trained.vocab_size

    check()
    data = random.Random(0).randbytes(20_000) + "<|endoftext|> <s><pad>é".encode() * 1000
    assert trained.decode_bytes(trained.encode(data).tolist()) == data
    assert trained.decode([0, 1, 2, 3, -1, SIZE]) == ""
    assert not trained.byte_lengths[:4].any()
    assert trained.vocab_size == len(trained.byte_lengths) == SIZE


def test_bytes_that_are_no_utf8_are_tokens_and_do_not_change_the_text_beside_them(trained: BytePieceVocabulary) -> None:
    dog = trained.encode(b"the dog").tolist()
    (broken,) = trained.encode(b"\xff").tolist()
    assert trained.encode(b"the dog\xff\xffthe dog").tolist() == [*dog, broken, broken, *dog]
    assert len(trained.encode("é".encode()[:1])) == len(trained.encode("é".encode()[1:])) == 1


def test_the_letters_of_pieces_are_the_librarys() -> None:
    assert BYTE_OF.keys() == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    splitter = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for character in map(chr, range(0x3000)):
        ((letters, _),) = splitter.pre_tokenize_str(character)
        assert bytes(BYTE_OF[letter] for letter in letters) == character.encode()


def test_gpt2s_files_give_the_tokens_of_transformers_and_4_more(gpt2: Path, trained: BytePieceVocabulary) -> None:
    ours = vocabulary_for(TextPart(()), TokenizerConfig(kind="byte_bpe", path=str(gpt2)), gpt2 / "cache")
    theirs = GPT2Tokenizer.from_pretrained(gpt2)
    assert len(theirs) == ours.vocab_size - 3
    assert ours.digest == trained.digest
    dice = random.Random(0)
    for sample in [*ODD, *("".join(dice.choices([*WORDS[:-1], *ODD], k=40)) for _ in range(100))]:
        assert ours.encode(sample.encode()).tolist() == [token + 4 for token in theirs(sample)["input_ids"]]
    assert theirs("<|endoftext|>")["input_ids"] == [SIZE - 4]  # its special token, while ours is text
    assert len(ours.encode(b"<|endoftext|>")) > 1


def test_what_a_run_keeps_is_read_by_others_with_the_models_ids(trained: BytePieceVocabulary, tmp_path: Path) -> None:
    trained.save(tmp_path)
    loaded = load_vocabulary(tmp_path, TokenizerConfig(kind="byte_bpe"))
    assert (loaded.digest, loaded.vocab_size) == (trained.digest, SIZE)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for sample in ODD:
        assert theirs.encode(sample).ids == loaded.encode(sample.encode()).tolist() == trained.encode(sample.encode()).tolist()
        assert theirs.decode(theirs.encode(sample).ids) == sample
    assert theirs.encode("<pad><unk><s><|endoftext|>").ids == [0, 1, 2, 3]
    before = (tmp_path / "tokenizer.json").read_bytes()
    loaded.save(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == before


def test_a_folder_may_hold_any_of_the_forms(gpt2: Path, kept: dict[str, Any], tmp_path: Path, trained: Any) -> None:
    old = {**kept, "model": {**kept["model"], "merges": [" ".join(merge) for merge in kept["model"]["merges"]]}}
    del old["model"]["type"]  # as the library once wrote it
    (tmp_path / "tokenizer.json").write_text(json.dumps(old))
    for path in (tmp_path, tmp_path / "tokenizer.json", gpt2):
        assert BytePieceVocabulary.load(path).digest == trained.digest
    for name in ("vocab.json", "merges.txt"):  # as Windows saves it
        (tmp_path / name).write_bytes((gpt2 / name).read_bytes().replace(b"\n", b"\r\n"))
    (tmp_path / "tokenizer.json").unlink()
    assert BytePieceVocabulary.load(tmp_path).digest == trained.digest


def test_equal_text_and_settings_give_equal_files_and_are_kept_by_content(text: TextPart, tmp_path: Path) -> None:
    config = TokenizerConfig(kind="byte_bpe", vocab_size=SIZE)
    same = write_text(tmp_path / "same.txt")
    for name, part in (("a", text), ("b", same), ("a", same)):
        byte_pieces_for(part, config, tmp_path / name)
    (first,), (second,) = ([*(tmp_path / name).glob("*/tokenizer.json")] for name in "ab")
    assert first.parent.name == second.parent.name
    assert first.read_bytes() == second.read_bytes()
    few = TokenizerConfig(kind="byte_bpe", vocab_size=300, sentences=50)
    assert byte_pieces_for(text, few, tmp_path / "a").vocab_size == 300
    assert len([*(tmp_path / "a").glob("tokenizer-*")]) == 2


def test_fewer_sentences_are_every_nth(tmp_path: Path) -> None:
    lines = ["aaaa bbbb", "cdcd cdcd"] * 100
    (tmp_path / "text.txt").write_text("\n".join(lines))
    (tmp_path / "odd.txt").write_text("\n".join(lines[::2]))
    half, odd = (
        byte_pieces_for(
            TextPart((tmp_path / name,)), TokenizerConfig(kind="byte_bpe", vocab_size=262, sentences=102), tmp_path / "cache"
        )
        for name in ("text.txt", "odd.txt")
    )
    assert half.digest == odd.digest
    assert len(half.encode(b"cdcd")) == 4


def test_text_that_is_no_utf8_trains_a_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("café au lait\n".encode("latin-1") * 50)
    part = TextPart((tmp_path / "text",))
    vocabulary = byte_pieces_for(part, TokenizerConfig(kind="byte_bpe", vocab_size=264), tmp_path / "cache")
    data = part.files[0].read_bytes()
    assert vocabulary.decode_bytes(vocabulary.encode(data).tolist()) == data


def test_a_text_too_small_for_its_vocabulary_says_what_it_can_have(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("one two one two\n")
    part = TextPart((tmp_path / "text",))
    with pytest.raises(OptionError, match=r"vocab_size to (\d+) or less") as caught:
        byte_pieces_for(part, TokenizerConfig(kind="byte_bpe", vocab_size=SIZE), tmp_path / "cache")
    possible = int("".join(filter(str.isdigit, caught.value.fix)))
    assert possible > 260
    fitting = TokenizerConfig(kind="byte_bpe", vocab_size=possible)
    assert byte_pieces_for(part, fitting, tmp_path / "cache").vocab_size == possible


def vocabulary_faults(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda table: change(table["model"]["vocab"])


BAD_TOKENIZERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no model": (lambda table: table.pop("model"), "not a tokenizer.json"),
    "another model": (lambda table: table["model"].update(type="WordPiece"), "its model is 'WordPiece'"),
    "normalization": (lambda table: table.update(normalizer={"type": "NFC"}), "normalizes text"),
    "no splitting": (lambda table: table.update(pre_tokenizer=None), "not byte-level: its pre_tokenizer is None"),
    "other splitting": (lambda table: table.update(pre_tokenizer={"type": "Metaspace"}), "'Metaspace', not ByteLevel"),
    "no pattern": (lambda table: table["pre_tokenizer"].update(use_regex=False), "does not cut words as GPT-2"),
    "a space before text": (lambda table: table["pre_tokenizer"].update(add_prefix_space=True), "puts a space before"),
    "marks of words": (lambda table: table["model"].update(end_of_word_suffix="</w>"), "by end_of_word_suffix"),
    "pieces before merges": (lambda table: table["model"].update(ignore_merges=True), "ignore_merges"),
    "tokens of text": (lambda table: table["added_tokens"].append({"content": "    ", "special": False}), "as '    '"),
    "no merges": (lambda table: table["model"].pop("merges"), "no merges"),
    "half a merge": (lambda table: table["model"]["merges"].insert(1, ["a"]), "not a merge of two pieces"),
    "no pieces": (lambda table: table["model"].pop("vocab"), "does not map pieces to ids"),
    "odd ids": (vocabulary_faults(lambda vocabulary: vocabulary.update(a=True)), "does not map pieces to ids"),
    "one id twice": (vocabulary_faults(lambda vocabulary: vocabulary.update(a=vocabulary["b"])), "two pieces have the same id"),
    "a byte without a piece": (vocabulary_faults(lambda vocabulary: vocabulary.pop("Ġ")), "byte 0x20 has no piece"),
    "an unknown part": (lambda table: table["model"]["merges"].append(["the", "zz"]), "needs 'zz'"),
    "letters that are no bytes": (lambda table: table["model"]["merges"].append(["日", "本"]), "needs '日'"),
    "a piece without an id": (lambda table: table["model"]["merges"].append(["z", "z"]), "produces 'zz', which has no id"),
    "a special token": (lambda table: table["model"]["merges"].extend([["<", "s"], ["<s", ">"]]), "special token"),
}


@pytest.mark.parametrize("fault", BAD_TOKENIZERS)
def test_a_bad_tokenizer_json_is_refused(fault: str, kept: dict[str, Any], tmp_path: Path) -> None:
    change, words_of_it = BAD_TOKENIZERS[fault]
    table = json.loads(json.dumps(kept))
    table["model"]["vocab"]["<s"] = 10_000
    change(table)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(table))
    with pytest.raises(InputError, match=words_of_it) as caught:
        vocabulary_for(TextPart(()), TokenizerConfig(kind="byte_bpe", path=str(path)), tmp_path / "cache")
    assert caught.value.where.startswith(str(path))
    assert "merges.txt" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "content", "what", "place"),
    [
        ("vocab.json", b"{", "not valid JSON", ""),
        ("vocab.json", b'["a", "b"]', "does not map pieces to ids", ""),
        ("vocab.json", b'{"a": 0}', "byte 0x00 has no piece", ""),
        ("merges.txt", b"#version: 0.2\nt h e\n", "not a merge of two pieces", ", line 2"),
        ("merges.txt", b"#version: 0.2\n\nt q\n", "produces 'tq', which has no id", ", line 3"),
        ("merges.txt", b"t h</w>\n", "needs 'h</w>', which is not a byte", ", line 1"),
        ("merges.txt", b"\xff\n", "not UTF-8", ", byte 1"),
        ("merges.txt", None, "the folder has no merges.txt, and no tokenizer.json", None),
        ("vocab.json", None, "the folder has no vocab.json, and no tokenizer.json", None),
    ],
)
def test_bad_files_of_gpt2s_form_are_refused(
    name: str, content: bytes | None, what: str, place: str | None, gpt2: Path, tmp_path: Path
) -> None:
    for other in ("vocab.json", "merges.txt"):
        (tmp_path / other).write_bytes((gpt2 / other).read_bytes())
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=what) as caught:
        BytePieceVocabulary.load(tmp_path)
    assert caught.value.where == (str(tmp_path) if place is None else f"{tmp_path / name}{place}")


def test_the_other_kind_of_file_is_named(gpt2: Path, text: TextPart, tmp_path: Path) -> None:
    model = tmp_path / "some.model"
    model.write_bytes(train_tokenizer(text.files[0].read_text().splitlines(), TokenizerConfig(vocab_size=380)))
    with pytest.raises(InputError, match="not valid JSON"):
        vocabulary_for(text, TokenizerConfig(kind="byte_bpe", path=str(model)), tmp_path)
    for path in (gpt2, gpt2 / "vocab.json"):
        with pytest.raises(OptionError, match="not a SentencePiece model") as caught:
            vocabulary_for(text, TokenizerConfig(path=str(path)), tmp_path)
        assert "byte_bpe" in caught.value.fix
    with pytest.raises(InputError, match="does not exist"):
        vocabulary_for(text, TokenizerConfig(kind="byte_bpe", path=str(tmp_path / "absent")), tmp_path)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"byte_fallback": False}, "byte_fallback has no effect on byte-level BPE"),
        ({"character_coverage": 0.99}, "character_coverage has no effect on byte-level BPE"),
        ({"normalization": "nfkc"}, "normalization has no effect on byte-level BPE"),
        ({"path": "folder", "vocab_size": 300}, "vocab_size has no effect on a vocabulary that exists"),
        ({"vocab_size": 259}, "4 special tokens and 256 bytes: 260 or more"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(OptionError, match=what):
        TokenizerConfig(kind="byte_bpe", **options)
    TokenizerConfig(kind="byte_bpe", normalization="identity", sentences=9)


@pytest.mark.parametrize("path", [None, "absent"])
def test_without_the_library_it_says_what_to_install(
    path: str | None, text: TextPart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(OptionError, match="tokenizers") as caught:
        vocabulary_for(text, TokenizerConfig(kind="byte_bpe", path=path), tmp_path / "cache")
    assert caught.value.fix == "pip install 'kilolayer[bpe]'"
    assert not (tmp_path / "cache").exists()
