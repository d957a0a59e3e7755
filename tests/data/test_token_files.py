"""Token files: what is written is read, and nothing half written or damaged is."""

from __future__ import annotations

import fcntl
import json
import logging
import pickle
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilolayer.data.cache_folder import built, content_key, damage
from kilolayer.data.filters import FilterReport
from kilolayer.data.store import PairWriter, TokenPairs
from kilolayer.errors import InputError, WriteError
from tests.data.token_pairs import make_pairs, write_pairs

ROWS = st.lists(st.tuples(*[st.lists(st.integers(1, 69_999), max_size=9)] * 2), max_size=20)


@given(ROWS, st.sampled_from([1 << 16, 70_000]))
@settings(deadline=None, max_examples=60)
def test_pairs_come_back(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[list[int], list[int]]], vocab: int) -> None:
    rows = [([min(t, vocab - 1) for t in source], [min(t, vocab - 1) for t in target]) for source, target in rows]
    pairs = write_pairs(tmp_path_factory.mktemp("pairs"), rows, vocab)
    assert pairs.tokens.dtype == (np.uint16 if vocab == 1 << 16 else np.uint32)
    assert [(pairs.source(i).tolist(), pairs.target(i).tolist()) for i in range(len(pairs))] == rows
    assert pairs.source_lengths.tolist() == [len(source) for source, _ in rows]
    assert pairs.target_lengths.tolist() == [len(target) for _, target in rows]
    pairs.release()
    assert [(pairs.source(i).tolist(), pairs.target(i).tolist()) for i in range(len(pairs))] == rows


@pytest.mark.parametrize("token", [-1, 0, 100])
def test_tokens_outside_the_vocabulary_and_padding_are_refused(tmp_path: Path, token: int) -> None:
    with pytest.raises(InputError, match="a token is not in 1 to 99"):
        write_pairs(tmp_path, [([5], [token])], 100)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", ["tokens.bin", "index.bin", "pairs.json"])
@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99, None])
def test_cut_or_missing_files_are_refused(tmp_path: Path, name: str, share: float | None) -> None:
    path = make_pairs(tmp_path / "pairs", [(5, 6)] * 50).folder / name
    whole = path.read_bytes()
    path.unlink()
    if share is not None:
        path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(InputError, match="damaged"):
        TokenPairs(tmp_path / "pairs")


@pytest.mark.parametrize("description", [b"[]", b"{}", b"null", pickle.dumps({}), b'{"pairs": 1e99}', b"\xff"])
def test_nonsense_descriptions_are_refused(tmp_path: Path, description: bytes) -> None:
    make_pairs(tmp_path / "pairs", [(5, 6)])
    (tmp_path / "pairs" / "pairs.json").write_bytes(description)
    with pytest.raises(InputError, match="damaged"):
        TokenPairs(tmp_path / "pairs")


def test_a_huge_declared_size_is_refused_at_once(tmp_path: Path) -> None:
    make_pairs(tmp_path / "pairs", [(5, 6)])
    path = tmp_path / "pairs" / "pairs.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokens": 40_000_000_000}))
    with pytest.raises(InputError, match=r"tokens\.bin"):
        TokenPairs(tmp_path / "pairs")


def build(draft: Path) -> None:
    (draft / "one.bin").write_bytes(bytes(range(200)))
    (draft / "two.txt").write_text("two")


def test_a_folder_is_built_once(tmp_path: Path) -> None:
    calls: list[Path] = []

    def count(draft: Path) -> None:
        calls.append(draft)
        build(draft)

    for _ in range(3):
        assert built(tmp_path / "deep" / "made", count) == tmp_path / "deep" / "made"
    assert len(calls) == 1
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["made"]


@pytest.mark.slow
def test_every_damage_is_found_and_repaired(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = built(tmp_path / "made", build)
    source = random.Random(0)
    for trial in range(100):
        path = folder / source.choice(["one.bin", "two.txt", "manifest.json"])
        content = bytearray(path.read_bytes())
        kind = trial % 4
        if kind == 0:
            content[source.randrange(len(content))] ^= 1 << source.randrange(8)
        elif kind == 1:
            del content[int(len(content) * source.choice([0, 0.01, 0.5, 0.99])) :]
        path.write_bytes(bytes(content))
        if kind == 2:
            path.unlink()
        elif kind == 3:
            (folder / "stranger").write_text("x")
        with caplog.at_level(logging.ERROR):
            built(folder, build)
        assert damage(folder) is None
        assert sorted(each.name for each in folder.iterdir()) == ["manifest.json", "one.bin", "two.txt"]
        assert (folder / "one.bin").read_bytes() == bytes(range(200))
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(draft: Path) -> None:
        build(draft)
        raise InputError("no good text")

    with pytest.raises(InputError, match="no good text"):
        built(tmp_path / "made", fail)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_or_a_bad_path_is_an_error_that_names_it(tmp_path: Path) -> None:
    def full(draft: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(WriteError, match="no space left on device") as caught:
        built(tmp_path / "made", full)
    assert str(tmp_path) in caught.value.where
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="cannot be written"):
        built(tmp_path / "file" / "made", build)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_of_two_builders_one_wins_and_both_can_read(tmp_path: Path) -> None:
    def late(draft: Path) -> None:
        build(draft)
        built(tmp_path / "made", build)

    assert damage(built(tmp_path / "made", late)) is None
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_killed_build_leaves_no_folder_in_its_place(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from kilolayer.data.cache_folder import built\n"
        "def build(draft):\n    (draft / 'one').write_text('1'); os.kill(os.getpid(), 9)\n"
        "built(Path(sys.argv[1]), build)"
    )
    folder = tmp_path / "made"
    assert subprocess.run([sys.executable, "-c", script, str(folder)], check=False).returncode == -9
    assert not folder.exists()
    assert damage(built(folder, build)) is None


BUILDER = """
import sys
from pathlib import Path
from kilolayer.data.cache_folder import built

def build(draft):
    (draft / "one").write_text("1")
    print("building", flush=True)
    sys.stdin.readline()

built(Path(sys.argv[1]), build)
"""


def start_builder(folder: Path) -> subprocess.Popen[str]:
    """A process that stands in the middle of a build, until it reads a line."""
    command = [sys.executable, "-c", BUILDER, str(folder)]
    builder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert builder.stdout is not None
    assert builder.stdout.readline() == "building\n"
    return builder


def test_drafts_of_the_dead_are_removed_and_those_of_the_living_stay(tmp_path: Path) -> None:
    living, dead = start_builder(tmp_path / "slow"), start_builder(tmp_path / "made")
    dead.send_signal(signal.SIGKILL)
    dead.communicate()
    assert {path.name.split(".")[1] for path in tmp_path.iterdir()} == {"slow", "made"}
    built(tmp_path / "other", build)
    left = {path.name for path in tmp_path.iterdir()}
    assert {name.split(".")[1] for name in left - {"other"}} == {"slow"}
    living.communicate("go on\n")
    assert living.returncode == 0
    assert damage(tmp_path / "slow") is None
    assert {path.name for path in tmp_path.iterdir()} == {"other", "slow"}


def test_a_draft_that_is_taken_for_abandoned_before_its_lock_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, stolen = fcntl.flock, []

    def unlink_first(file: IO[str], how: int) -> None:
        if not stolen:
            stolen.append(file.name)
            Path(file.name).unlink()  # what another process does that was quicker
        lock(file, how)

    monkeypatch.setattr("kilolayer.data.cache_folder.fcntl.flock", unlink_first)
    assert damage(built(tmp_path / "made", build)) is None
    assert stolen
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_keys_follow_content_and_settings_not_names(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("text")
    shutil.copy(one, two)
    assert content_key({"a": 1}, [one]) == content_key({"a": 1}, [two])
    assert content_key({"a": 2}, [one]) != content_key({"a": 1}, [one])
    two.write_text("texts")
    assert content_key({"a": 1}, [one]) != content_key({"a": 1}, [two])


def test_the_writer_takes_flat_arrays(tmp_path: Path) -> None:
    with PairWriter(tmp_path, 100) as writer:
        for _ in range(2):
            writer.append_flat(np.array([5, 6, 7, 8, 9, 3]), np.array([2, 1]), np.array([1, 2]))
        writer.finish(FilterReport(read=4, kept=4))
    pairs = TokenPairs(tmp_path)
    assert [pairs.source(i).tolist() for i in range(4)] == [[5, 6], [8], [5, 6], [8]]
    assert [pairs.target(i).tolist() for i in range(4)] == [[7], [9, 3], [7], [9, 3]]
