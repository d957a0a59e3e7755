"""Preparation by several processes, and after a kill: always the same bytes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from kilolayer.data import encode, encoding_processes, preparation_progress, resumable_writer
from kilolayer.data.cache_folder import KEPT_SECONDS, built
from kilolayer.data.corpora import Direction, ParallelText
from kilolayer.data.encode import encode_text
from kilolayer.data.filters import FilterConfig
from kilolayer.data.pair_encoder import Chunk, EncodedChunk, PairEncoder
from kilolayer.data.store import TokenPairs
from kilolayer.data.tokenizer import Tokenizer, TokenizerConfig, Tokenizers, train_tokenizer
from kilolayer.errors import InputError, KilolayerError

WORDS = ["the", "a", "red", "green", "old", "small", "house", "tree", "dog", "bird", "sees", "likes", "finds"]
LINES = [f"{a} {b} {c} {d}" for a in WORDS for b in WORDS for c in WORDS[3:6] for d in WORDS[6:8]]
CHUNK, EVERY = 50, 4
KILLED = """
import os, signal, sys
from pathlib import Path
from kilolayer.data import encode, resumable_writer
from tests.data import test_preparation as tests

encode.PAIRS_AT_ONCE, resumable_writer.JOURNAL_EVERY = tests.CHUNK, tests.EVERY
append = resumable_writer.ResumablePairWriter.append_chunk

def append_and_die(self, *chunk):
    append(self, *chunk)
    if self.chunks == int(sys.argv[2]):
        for file in (*self._files, self._chunks):
            file.flush()
        self._files[1].write(b"half of an entry"[:7])
        self._files[1].flush()
        os.kill(os.getpid(), signal.SIGKILL)

resumable_writer.ResumablePairWriter.append_chunk = append_and_die
folder = Path(sys.argv[1])
tests.prepare(folder, folder / "cache", processes=int(sys.argv[3]))
"""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "PAIRS_AT_ONCE", CHUNK)
    monkeypatch.setattr(resumable_writer, "JOURNAL_EVERY", EVERY)


def write_text(folder: Path) -> None:
    """1,014 different pairs, some of them repeated far away, with an empty one, a long one and a lopsided one."""
    sources = [*LINES, *LINES[100:300], "", "dog " * 90, "tree", *LINES[:5]]
    targets = [line[::-1] for line in [*LINES, *LINES[100:300], "x", "dog " * 90, "tree " * 20, *LINES[:5]]]
    for language, lines in (("en", sources), ("de", targets)):
        (folder / f"train.{language}").write_text("".join(f"{line}\n" for line in lines))
    Tokenizer(train_tokenizer(LINES, TokenizerConfig(kind="bpe", vocab_size=300, character_coverage=1.0), [])).save(
        folder / "pieces"
    )


def prepare(folder: Path, cache: Path, processes: int) -> TokenPairs:
    files = folder / "train.en", folder / "train.de"
    both = Tokenizer.load(folder / "pieces")
    text = ParallelText(files, Direction("en", "de"), len(files[0].read_text().splitlines()))
    filters = FilterConfig(max_tokens=80)
    return encode_text(text, Tokenizers(both, both), cache, tagged=False, filters=filters, processes=processes)


def contents(pairs: TokenPairs) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in pairs.folder.iterdir() if path.name != "manifest.json"}


def test_one_process_and_three_write_the_same(tmp_path: Path) -> None:
    write_text(tmp_path)
    one, three = (prepare(tmp_path, tmp_path / f"cache{count}", count) for count in (1, 3))
    assert contents(one) == contents(three)
    assert contents(one).keys() == {"tokens.bin", "index.bin", "pairs.json"}
    assert one.report == three.report
    assert one.report.read == len(LINES) + 208
    assert [one.report.empty, one.report.duplicate, one.report.too_long, one.report.ratio] == [1, 205, 1, 1]


@pytest.mark.parametrize(("dies_at", "processes"), [(EVERY - 1, 1), (EVERY, 1), (3 * EVERY + 2, 2)])
def test_a_killed_preparation_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dies_at: int, processes: int
) -> None:
    write_text(tmp_path)
    expected = prepare(tmp_path, tmp_path / "undisturbed", 1)
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(dies_at), str(processes)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not list((tmp_path / "cache").glob("pairs-*"))
    encoded: list[int] = []

    def counted(encoder: PairEncoder, chunks: Iterable[Chunk], count: int) -> Iterator[EncodedChunk]:
        for chunk in encoding_processes.encode_chunks(encoder, chunks, count):
            encoded.append(chunk.report.read)
            yield chunk

    monkeypatch.setattr(encode, "encode_chunks", counted)
    again = prepare(tmp_path, tmp_path / "cache", processes)
    done = dies_at // EVERY * EVERY * CHUNK
    assert sum(encoded) == expected.report.read - done
    assert contents(again) == contents(expected)
    assert ("continuing after" in capsys.readouterr().err) == (done > 0)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [again.folder.name]


def test_a_damaged_beginning_is_not_continued(tmp_path: Path) -> None:
    write_text(tmp_path)
    expected = contents(prepare(tmp_path, tmp_path / "undisturbed", 1))
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(2 * EVERY), "1"]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    for name in ("tokens.bin", "index.bin", "chunks.bin", "journal.json"):
        for how in ("changed", "cut", "removed"):
            cache = tmp_path / f"{name} {how}"
            shutil.copytree(tmp_path / "cache", cache)
            (draft,) = (path for path in cache.iterdir() if path.is_dir())
            data = (draft / name).read_bytes()
            if how == "removed":
                (draft / name).unlink()
            else:
                (draft / name).write_bytes(data[:-30] if how == "cut" else data[:9] + bytes([data[9] ^ 1]) + data[10:])
            assert contents(prepare(tmp_path, cache, 1)) == expected, (name, how)


def test_a_process_that_is_killed_is_named_and_the_rest_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path)
    started: list[subprocess.Popen[bytes]] = []
    start, receive = encoding_processes._start, encoding_processes._receive
    received: list[int] = []

    def remembered() -> subprocess.Popen[bytes]:
        started.append(start())
        return started[-1]

    def receive_and_kill(child: subprocess.Popen[bytes]) -> EncodedChunk:
        received.append(1)
        if len(received) == EVERY + 2:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
        return receive(child)

    monkeypatch.setattr(encoding_processes, "_start", remembered)
    monkeypatch.setattr(encoding_processes, "_receive", receive_and_kill)
    with pytest.raises(KilolayerError, match="was killed"):
        prepare(tmp_path, tmp_path / "cache", 2)
    assert all(child.poll() is not None for child in started)
    monkeypatch.setattr(encoding_processes, "_receive", receive)
    assert contents(prepare(tmp_path, tmp_path / "cache", 2)) == contents(prepare(tmp_path, tmp_path / "other", 1))


def test_bad_text_leaves_nothing(tmp_path: Path) -> None:
    write_text(tmp_path)
    with open(tmp_path / "train.de", "ab") as file:
        file.write(b"\xff\n")
    with open(tmp_path / "train.en", "ab") as file:
        file.write(b"x\n")
    text = ParallelText((tmp_path / "train.en", tmp_path / "train.de"), Direction("en", "de"), len(LINES) + 209)
    both = Tokenizer.load(tmp_path / "pieces")
    with pytest.raises(InputError, match="not valid UTF-8"):
        encode_text(text, Tokenizers(both, both), tmp_path / "cache", tagged=False, processes=2)
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_interrupted_build_is_continued_and_an_old_one_removed(tmp_path: Path) -> None:
    def stop(draft: Path) -> None:
        (draft / "begun").write_text("x")
        raise KeyboardInterrupt

    for name in ("one", "two"):
        with pytest.raises(KeyboardInterrupt):
            built(tmp_path / name, stop, resumable=True)
    lock = tmp_path / ".one.unfinished.lock"
    long_ago = lock.stat().st_mtime - KEPT_SECONDS - 1
    os.utime(lock, (long_ago, long_ago))
    found: list[str] = []
    built(tmp_path / "two", lambda draft: found.extend(path.name for path in draft.iterdir()), resumable=True)
    assert found == ["begun"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["two"]


def test_a_second_process_does_not_touch_what_the_first_writes(tmp_path: Path) -> None:
    drafts: list[Path] = []

    def nested(draft: Path) -> None:
        drafts.append(draft)
        if len(drafts) == 1:
            built(tmp_path / "made", nested, resumable=True)
        (draft / "file").write_text("x")

    built(tmp_path / "made", nested, resumable=True)
    assert drafts[0] != drafts[1]
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_progress_says_how_much_is_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    monkeypatch.setattr(preparation_progress.time, "monotonic", lambda: now)
    progress = preparation_progress.PreparationProgress("train.en", 1_000_000)
    now = 130.0
    progress.show(100_000)
    now = 200.0
    progress.show(250_000)
    progress.end()
    assert capsys.readouterr().err == "preparing train.en: 25% of 1,000,000 pairs, 2,500 a second, 5 min left\n"
