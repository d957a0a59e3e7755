"""Large epochs in sections: the same promises as for small epochs, without an index of all pairs."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest

from kilolayer.data import mixing, sections
from kilolayer.data.batches import BatchConfig, Batches
from kilolayer.data.filters import FilterReport
from kilolayer.data.mixing import Mixture, Part
from kilolayer.data.store import PairWriter, TokenPairs
from kilolayer.errors import InputError
from tests.data.test_batches import numbers, same
from tests.data.token_pairs import make_pairs, random_lengths

CONFIG = BatchConfig(tokens=200, shapes=5)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "BLOCK", 8)
    monkeypatch.setattr(sections, "SECTION", 100)


def epoch_of(batches: Batches) -> list[list[int]]:
    """The pairs of the next epoch, batch by batch; epochs may differ in their number of batches."""
    first = numbers(next(batches))
    return [first, *(numbers(next(batches)) for _ in range(len(batches) - 1))]


@pytest.mark.parametrize("count", [1, 7, 8, 99, 100, 101, 643])
def test_every_pair_once_an_epoch(tmp_path: Path, count: int) -> None:
    batches = Batches(make_pairs(tmp_path / "pairs", random_lengths(count)), CONFIG, seed=3, whole=0)
    epochs = [epoch_of(batches), epoch_of(batches)]
    assert [batches.epoch, batches.index] == [1, len(epochs[1])]
    for epoch in epochs:
        assert sorted(pair for batch in epoch for pair in batch) == list(range(count))
    assert epochs[0] != epochs[1] or count == 1


def test_a_section_holds_pairs_from_the_whole_corpus_and_they_are_shuffled(tmp_path: Path) -> None:
    batches = Batches(make_pairs(tmp_path / "pairs", random_lengths(2000)), CONFIG, seed=0, whole=0)
    shown = [pair for batch in epoch_of(batches) for pair in batch]
    first = shown[:90]
    assert max(first) - min(first) > 1200
    assert sum(abs(a - b) == 1 for a, b in pairwise(shown)) < 200
    other = Batches(batches.mixture, CONFIG, seed=1, whole=0)
    assert [pair for batch in epoch_of(other) for pair in batch] != shown


def test_corpora_are_shown_by_their_rates_in_every_section_and_evenly_in_the_long_run(tmp_path: Path) -> None:
    sizes, rates = (300, 20, 50), (1.0, 4.5, 0.3)
    parts = [
        Part(make_pairs(tmp_path / str(i), random_lengths(size, i), first=1000 * i), upsample=rate)
        for i, (size, rate) in enumerate(zip(sizes, rates, strict=True))
    ]
    batches = Batches(Mixture(parts), CONFIG, seed=2, whole=0)
    assert batches.mixture.quotas == [300, 90, 15]
    epochs = [epoch_of(batches) for _ in range(10)]
    for epoch in epochs:
        shown = Counter(pair // 1000 for batch in epoch for pair in batch)
        assert shown == {0: 300, 1: 90, 2: 15}
        early = Counter(pair // 1000 for batch in epoch[: len(epoch) // 2] for pair in batch)
        assert early[1] > 25
        assert early[2] > 3
    total = Counter(pair for epoch in epochs for batch in epoch for pair in batch)
    assert {total[pair] for pair in range(300)} == {10}
    assert {total[1000 + pair] for pair in range(20)} == {45}
    assert {total[2000 + pair] for pair in range(50)} == {3}


def test_a_position_is_found_again(tmp_path: Path) -> None:
    pairs = make_pairs(tmp_path / "pairs", random_lengths(500))
    batches = Batches(pairs, CONFIG, seed=1, cache=tmp_path / "cache", whole=0)
    length = len(batches)
    for stop in (0, 3, length // 2, length - 1, length, length + 5):
        first = Batches(pairs, CONFIG, seed=1, cache=tmp_path / "cache", whole=0)
        for _ in range(stop):
            first.skip()
        second = Batches(pairs, CONFIG, seed=1, cache=tmp_path / "cache", whole=0)
        second.load_state(first.state())
        for one, other in islice(zip(first, second, strict=False), 12):
            assert same(one, other)


def test_the_second_start_reads_no_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = make_pairs(tmp_path / "pairs", random_lengths(500))
    before = Batches(pairs, CONFIG, cache=tmp_path / "cache", whole=0)
    expected = next(before)
    without = Batches(pairs, CONFIG, whole=0)
    read: list[int] = []
    shapes_of = sections.Sections._shapes

    def counted(self: sections.Sections, number: int, begin: int, end: int) -> np.ndarray:
        read.append(end - begin)
        return shapes_of(self, number, begin, end)

    monkeypatch.setattr(Mixture, "lengths", lambda self: pytest.fail("all lengths were read again"))
    monkeypatch.setattr(sections.Sections, "_shapes", counted)
    again = Batches(pairs, CONFIG, cache=tmp_path / "cache", whole=0)
    assert read == []
    assert same(next(again), expected)
    assert sum(read) < 250  # a section, and the blocks that sections divide
    assert same(next(without), expected)


def test_an_epoch_that_began_as_a_whole_goes_on_so(tmp_path: Path) -> None:
    pairs = make_pairs(tmp_path / "pairs", random_lengths(300))
    whole, other = Batches(pairs, CONFIG, seed=1), Batches(pairs, CONFIG, seed=1, whole=0)
    assert not same(next(whole), next(other))
    position = whole.state()
    other.load_state(position)
    assert other.state() == position
    for one, same_one in islice(zip(whole, other, strict=False), len(whole) + 3):
        assert same(one, same_one)
    with pytest.raises(InputError, match="different data"):
        Batches(pairs, CONFIG, seed=1).load_state(Batches(pairs, CONFIG, seed=1, whole=0).state())


def test_padding_is_that_of_the_batches(tmp_path: Path) -> None:
    pairs = make_pairs(tmp_path / "pairs", random_lengths(500))
    batches = Batches(pairs, CONFIG, seed=1, whole=0)
    epoch = [next(batches) for _ in range(len(batches))]
    cells = sum(batch.source.numel() + batch.labels.numel() for batch in epoch)
    real = sum(int((batch.source != 0).sum()) + batch.tokens for batch in epoch)
    assert batches.padding == pytest.approx(1 - real / cells)


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "BLOCK", 1 << 8)
    monkeypatch.setattr(sections, "SECTION", 1 << 14)
    for module in (sections, mixing):
        monkeypatch.setattr(module, "PAIRS_AT_ONCE", 1 << 14)
    peaks: dict[tuple[int, int], int] = {}
    for count in (100_000, 800_000):
        folder = tmp_path / str(count)
        folder.mkdir()
        rng = np.random.default_rng(0)
        with PairWriter(folder, 100) as writer:
            lengths = rng.integers(2, 20, count)
            writer.append_flat(np.full(int(2 * lengths.sum()), 5), lengths, lengths)
            writer.finish(FilterReport())
        for whole in (count, 0):
            tracemalloc.start()
            batches = Batches(TokenPairs(folder), BatchConfig(), whole=whole)
            for _ in range(3):
                next(batches)
            peaks[count, whole] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    assert peaks[800_000, 800_000] - peaks[100_000, 100_000] > 8 * 700_000
    assert peaks[800_000, 0] - peaks[100_000, 0] < 700_000
