"""Text of any bytes: read, cut into tokens and put together again, or refused by file, line and byte, in little memory."""

from __future__ import annotations

import gzip
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kilolayer.data import text
from kilolayer.data.cache_folder import built, damage
from kilolayer.data.corpora import DataConfig
from kilolayer.data.documents import TextPart
from kilolayer.data.store import TokenPairs
from kilolayer.data.text import count_lines, read_lines
from kilolayer.data.token_text import encode_documents
from kilolayer.data.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from kilolayer.data.vocabulary import ByteVocabulary, vocabulary_for
from kilolayer.errors import InputError
from kilolayer.tasks.translation.config import TranslationConfig
from kilolayer.tasks.translation.task import TranslationTask
from tests.faults.children import NOBODY, SERVER

PARTS = [b"\n", b"\r", b"\t", b"\0", b"\xef\xbb\xbf", b"\xff", b"\xc3", b"\xe2\x80\xa8", b"\xe2\x96\x81"]
PARTS += [b"\xed\xa0\x80", b"\x1b[2J"]
PARTS += [b"<s>", b"</s>", b"<0x41>", b"<2de>", b"<bt>", b"  ", b"a", b'{"text": "', b'"}', b"[" * 2000, "\U0001f600".encode()]


def byte_strings(count: int, seed: int) -> list[bytes]:
    dice = random.Random(seed)
    odd = [b"".join(dice.choices(PARTS, k=dice.randrange(12))) for _ in range(count // 2)]
    return odd + [dice.randbytes(dice.randrange(200)) for _ in range(count - len(odd))]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    lines = [" ".join(random.Random(n).choices(["the", "dog", "sees", "a", "cat", "caf\u00e9"], k=6)) for n in range(200)]
    configs = [
        TokenizerConfig(vocab_size=300, kind="bpe"),
        TokenizerConfig(vocab_size=24, byte_fallback=False, character_coverage=1.0),
    ]
    return [Tokenizer(train_tokenizer(lines, config)) for config in configs]


def read_all(strings: list[bytes], tokenizers: list[Tokenizer], folder: Path) -> None:
    for data in strings:
        shown = data.decode("utf-8", "surrogateescape")
        for tokenizer in tokenizers:
            (ids,) = tokenizer.encode([shown])
            assert all(0 <= token < tokenizer.vocab_size for token in ids)
            assert isinstance(tokenizer.decode([ids])[0], str)
        assert bytes((ByteVocabulary().encode(data) - 4).astype(np.uint8)) == data
        for name in ("text.txt", "text.jsonl", "text.txt.gz"):
            path = folder / name
            path.write_bytes(data)
            for place in (fault_location(read_lines, path), fault_location(pieces, path), fault_location(count, path)):
                assert place.startswith(str(path)) or not place


def pieces(path: Path) -> Iterator[bytes | None]:
    return TextPart((path,)).pieces(utf8=True)


def count(path: Path) -> Iterator[int]:
    yield count_lines(path)


def fault_location(read: Callable[[Path], Iterator[object]], path: Path) -> str:
    """Where a file cannot be read; empty where it can."""
    try:
        for _ in read(path):
            pass
    except InputError as error:
        return error.where
    return ""


@pytest.mark.slow
def test_150_byte_strings_are_read_or_refused(tokenizers: list[Tokenizer], tmp_path: Path) -> None:
    read_all(byte_strings(150, 1), tokenizers, tmp_path)


@pytest.mark.slow
def test_10000_byte_strings_are_read_or_refused(tokenizers: list[Tokenizer], tmp_path: Path) -> None:
    read_all(byte_strings(10_000, 2), tokenizers, tmp_path)


def test_an_endless_line_is_named_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "text.en.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"first\n")
        for _ in range(80):
            file.write(bytes(1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match="more than 67,108,864 bytes") as caught:
        list(read_lines(path))
    assert caught.value.where == f"{path}, line 2"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10
    assert count_lines(path) == 2


def test_the_limit_of_a_line_counts_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "LONGEST_LINE", 10)
    path = tmp_path / "text"
    path.write_bytes(b"x" * 9 + b"\n" + b"y" * 10)
    assert list(read_lines(path)) == ["x" * 9, "y" * 10]
    path.write_bytes(b"x" * 10 + b"\n")
    with pytest.raises(InputError, match="more than 10 bytes"):
        list(read_lines(path))
    documents = tmp_path / "text.jsonl"
    documents.write_text('\n{"text": "x"}\n')
    with pytest.raises(InputError, match="more than 10 bytes") as caught:
        list(pieces(documents))
    assert caught.value.where == f"{documents}, line 2"


def test_documents_nested_without_end_are_named(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "fine"}\n' + "[" * 100_000)
    with pytest.raises(InputError, match="not a JSON object") as caught:
        list(TextPart((path,)).pieces(utf8=True))
    assert caught.value.where == f"{path}, line 2"


@pytest.mark.matrix(2)
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("spaces", [0, 1], ids=["no space", "one space"])
def test_a_vocabulary_of_text_without_spaces_gives_every_text_back(kind: str, spaces: int, tmp_path: Path) -> None:
    dice = random.Random(0)
    letters = [chr(0x4E00 + index) for index in range(60)]
    lines = ["".join(dice.choices(letters, k=30)) for _ in range(300)]
    path = tmp_path / "text.txt"
    path.write_text("\n".join(lines) + " " * spaces, encoding="utf-8")
    config = TokenizerConfig(kind=kind, vocab_size=400, normalization="identity")  # pyright: ignore[reportArgumentType]
    vocabulary = vocabulary_for(TextPart((path,)), config, tmp_path / "cache")
    for read in (lines[0], " \u4e00  \u4e01\n\u2581 \u00e9 x ", "\0 \ufeff", ""):
        ids = vocabulary.encode(read.encode())
        assert vocabulary.decode(ids.tolist()) == read
        assert vocabulary.byte_lengths[ids].sum() == len(read.encode())


def test_a_vocabulary_that_was_trained_here_never_speaks_of_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.txt"
    path.write_text("some words and some more words\n" * 50)
    monkeypatch.setattr("kilolayer.data.vocabulary.PieceVocabulary.encode", lambda self, data: np.zeros(1, np.int64))
    with pytest.raises(InputError, match="restore the text exactly") as caught:
        vocabulary_for(TextPart((path,)), TokenizerConfig(vocab_size=273, normalization="identity"), tmp_path / "cache")
    assert "tokenizer.path" not in str(caught.value)


FAULTS: dict[str, Callable[[Path], object]] = {
    "invalid UTF-8": lambda path: path.write_bytes(path.read_bytes()[:-3] + b"\xff\n"),
    "another count of lines": lambda path: path.write_bytes(path.read_bytes() + b"one more\n"),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("part", ["valid.de", "test.en"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_held_out_text_show_before_the_vocabulary_is_trained(
    part: str, fault: str, corpus: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(corpus, tmp_path / "text")
    FAULTS[fault](folder / part)
    data = DataConfig(folder=str(folder), directions=["en-de"], valid="valid", test="test")
    tokenizer = TokenizerConfig(vocab_size=90, byte_fallback=False)
    with pytest.raises(InputError) as caught:
        TranslationTask.prepare(TranslationConfig(data=data, tokenizer=tokenizer), tmp_path / "cache")
    assert str(folder / part) in caught.value.where
    assert not (tmp_path / "cache").exists()


def test_tokens_are_read_after_their_cache_was_deleted(corpus: Path, tmp_path: Path) -> None:
    part = encode_documents(TextPart((corpus / "train.en",)), ByteVocabulary(), tmp_path / "text")
    before = part.read(np.array([0, 7]), 5)
    data = DataConfig(folder=str(corpus), directions=["en-de"])
    tokenizer = TokenizerConfig(vocab_size=90, byte_fallback=False, character_coverage=1.0)
    task = TranslationTask.prepare(TranslationConfig(data=data, tokenizer=tokenizer), tmp_path / "pairs")
    task.training_batches(1)
    pairs = TokenPairs(next((tmp_path / "pairs").glob("pairs-*")))
    pairs.keep_open()
    tokens, _ = pairs.fetch(np.array([3, 4]), read=True)
    for folder in ("text", "pairs"):
        shutil.rmtree(tmp_path / folder)
    assert (part.read(np.array([0, 7]), 5) == before).all()
    assert (pairs.fetch(np.array([3, 4]), read=True)[0] == tokens).all()


ODD_FILES: dict[str, Callable[[Path], object]] = {
    "link": lambda path: (shutil.copy(path, path.parent.parent / "other"), path.unlink(), path.symlink_to("../other")),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "sparse": lambda path: os.truncate(path, 1 << 40),
    "folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("odd", ODD_FILES)
@pytest.mark.parametrize("name", ["content", "manifest.json"])
def test_odd_files_in_a_cache_are_made_anew(odd: str, name: str, tmp_path: Path) -> None:
    def build(draft: Path) -> None:
        (draft / "content").write_bytes(b"made")

    folder = built(tmp_path / "cache" / "made", build)
    ODD_FILES[odd](folder / name)
    if (odd, name) != ("link", "manifest.json"):  # where the same bytes are behind it, it says the same
        assert damage(folder) is not None
    assert (built(folder, build) / "content").read_bytes() == b"made"
    assert damage(folder) is None


def _read_cache(folder: str) -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)

    def build(draft: Path) -> None:
        raise AssertionError

    assert (built(Path(folder), build) / "content").read_bytes() == b"made"


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_cache_that_is_read_only_and_whole_serves(tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = Path(f"/tmp/{tmp_path_factory.getbasetemp().name}-{os.getpid()}-cache")
    try:
        folder = built(cache / "made", lambda draft: (draft / "content").write_bytes(b"made") and None)
        for path in (cache, folder):
            path.chmod(0o755)
        process = SERVER.Process(target=_read_cache, args=(str(folder),))
        process.start()
        process.join(60)
        assert process.exitcode == 0
    finally:
        shutil.rmtree(cache)
