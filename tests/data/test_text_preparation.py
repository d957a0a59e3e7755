"""Running text encoded by several processes, and after a kill: always the same bytes."""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kilolayer.data import resumable_text, token_text
from kilolayer.data.documents import TextPart
from kilolayer.data.token_text import TextEncoder, TokenText, encode_documents
from kilolayer.data.tokenizer import END
from kilolayer.data.vocabulary import ByteVocabulary, TextVocabulary
from kilolayer.data.word_pieces import WordPieceVocabulary
from tests.data.test_vocabulary import text, vocabulary  # noqa: F401  fixtures

CHUNK, EVERY = 300, 3
KILLED = """
import os, signal, sys
from pathlib import Path
from kilolayer.data import resumable_text, token_text
from tests.data import test_text_preparation as tests

token_text.CHUNK_BYTES, resumable_text.JOURNAL_EVERY = tests.CHUNK, tests.EVERY
append = resumable_text.ResumableTextWriter.append

def append_and_die(self, *chunk):
    append(self, *chunk)
    if self.counts["chunks"] == int(sys.argv[2]):
        self._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

resumable_text.ResumableTextWriter.append = append_and_die
tests.prepare(Path(sys.argv[1]), "cache", 2)
"""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_text, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(resumable_text, "JOURNAL_EVERY", EVERY)


def write_documents(folder: Path) -> list[bytes]:
    documents = [f"{'word ' * (7 * i % 60)}of document {i}\n" for i in range(80)]
    (folder / "some.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    (folder / "last.txt").write_text("x" * 5000)
    return [*(each.encode() for each in documents), b"x" * 5000]


def prepare(folder: Path, cache: str, processes: int) -> TokenText:
    return encode_documents(
        TextPart((folder / "some.jsonl", folder / "last.txt")), ByteVocabulary(), folder / cache, processes=processes
    )


def contents(made: TokenText) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in made.folder.iterdir() if path.name != "manifest.json"}


def test_one_process_and_three_write_what_the_documents_say(tmp_path: Path) -> None:
    documents = write_documents(tmp_path)
    one, three = (prepare(tmp_path, f"cache{count}", count) for count in (1, 3))
    assert contents(one) == contents(three)
    assert contents(one).keys() == {"tokens.bin", "text.json"}
    encode = ByteVocabulary().encode
    expected = np.concatenate([[END], *(np.append(encode(document), END) for document in documents)])
    assert one.read(np.array([0]), len(one))[0].tolist() == expected.tolist()
    assert (one.documents, one.bytes) == (len(documents), sum(map(len, documents)))


@pytest.mark.parametrize("dies_at", [EVERY - 1, 2 * EVERY + 1])
@pytest.mark.parametrize("damage", [False, True])
def test_a_killed_preparation_is_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dies_at: int, damage: bool
) -> None:
    write_documents(tmp_path)
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(dies_at)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    (draft,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    tokens = (draft / "tokens.bin").read_bytes()
    assert tokens
    if damage:
        (draft / "tokens.bin").write_bytes(bytes([tokens[0] ^ 1]) + tokens[1:])
    again = prepare(tmp_path, "cache", 1)
    assert ("continuing after" in capsys.readouterr().err) == (dies_at >= EVERY and not damage)
    assert contents(again) == contents(prepare(tmp_path, "undisturbed", 1))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [again.folder.name]


def check_sent(ours: TextVocabulary) -> None:
    """A copy encodes alike, text that spells special tokens too."""
    sent = pickle.loads(pickle.dumps(TextEncoder(ours))).vocabulary
    data = f"The bird sees a house. {' '.join(ours.pieces[:5])} [MASK]\n".encode()
    assert sent.encode(data).tolist() == ours.encode(data).tolist()
    assert sent.digest == ours.digest


def test_every_vocabulary_can_be_sent_to_another_process(vocabulary: TextVocabulary) -> None:  # noqa: F811
    check_sent(vocabulary)


def test_word_pieces_can_be_sent_to_another_process(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "bird", "[", "]", "c", "##ls", "mask", "pad", "."]
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    check_sent(WordPieceVocabulary.load(tmp_path))
