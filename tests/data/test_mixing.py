"""Many directions: shares by temperature, rates, and every pair equally often in the long run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilolayer.data.batches import BatchConfig, Batches
from kilolayer.data.mixing import Mixture, Part
from kilolayer.errors import InputError
from tests.data.test_batches import numbers, same
from tests.data.token_pairs import make_pairs, random_lengths

CONFIG = BatchConfig(tokens=200, shapes=4)


def parts(folder: Path, *sizes: int, upsample: float = 1.0) -> list[Part]:
    """One direction a size; pairs are numbered through."""
    made, first = [], 0
    for i, size in enumerate(sizes):
        made.append(Part(make_pairs(folder / str(i), random_lengths(size, i), first), f"en-x{i}", upsample))
        first += size
    return made


def epoch(batches: Batches) -> Counter[int]:
    """How often each pair comes in the epoch that begins now."""
    if batches.index:
        batches.epoch, batches.index = batches.epoch + 1, 0
    return Counter(number for _ in range(len(batches)) for number in numbers(next(batches)))


def test_at_temperature_one_every_pair_comes_once(tmp_path: Path) -> None:
    batches = Batches(Mixture(parts(tmp_path, 100, 7, 30)), CONFIG, seed=1)
    assert batches.mixture.quotas == [100, 7, 30]
    for _ in range(3):
        assert epoch(batches) == Counter(range(137))


def test_batches_hold_several_directions(tmp_path: Path) -> None:
    batches = Batches(Mixture(parts(tmp_path, 100, 100)), BatchConfig(tokens=800, shapes=2), seed=1)
    assert {number < 100 for number in numbers(next(batches))} == {True, False}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0, 1e9])
def test_shares_follow_the_temperature(tmp_path: Path, temperature: float) -> None:
    sizes = [1000, 100, 10]
    mixture = Mixture(parts(tmp_path, *sizes), temperature)
    weights = [size ** (1 / temperature) for size in sizes]
    assert mixture.quotas == [round(1110 * weight / sum(weights)) for weight in weights]
    counts = epoch(Batches(mixture, CONFIG, seed=1))
    found = [sum(counts[i] for i in range(start, stop)) for start, stop in ((0, 1000), (1000, 1100), (1100, 1110))]
    assert found == mixture.quotas


def test_in_the_long_run_all_pairs_of_a_direction_come_equally_often(tmp_path: Path) -> None:
    batches = Batches(Mixture(parts(tmp_path, 60, 9), temperature=3), CONFIG, seed=1)
    total: Counter[int] = Counter()
    for _ in range(7):
        total += epoch(batches)
        for numbers_of_one in (range(60), range(60, 69)):
            counts = [total[number] for number in numbers_of_one]
            assert max(counts) - min(counts) <= 1


@given(st.floats(0.1, 3.5))
@settings(deadline=None, max_examples=25)
def test_rates_multiply_what_an_epoch_shows(tmp_path_factory: pytest.TempPathFactory, rate: float) -> None:
    folder = tmp_path_factory.mktemp("m")
    genuine = Part(make_pairs(folder / "a", random_lengths(40)), "en-de", rate)
    synthetic = Part(make_pairs(folder / "b", random_lengths(30, 1), 40), "en-de")
    counts = epoch(Batches(Mixture([genuine, synthetic]), CONFIG, seed=1))
    shown = [counts[number] for number in range(40)]
    assert sum(shown) == max(round(40 * rate), 1)
    assert max(shown) - min(shown) <= 1
    assert [counts[number] for number in range(40, 70)] == [1] * 30


def test_a_direction_with_two_corpora_has_one_share(tmp_path: Path) -> None:
    first, second, third = parts(tmp_path, 100, 300, 400)
    together = Mixture([Part(first.pairs, "en-de"), Part(second.pairs, "en-de"), Part(third.pairs, "en-fr")], 1e9)
    assert together.quotas == [100, 300, 400]


def test_the_position_over_all_parts_is_restored(tmp_path: Path) -> None:
    mixture = Mixture(parts(tmp_path, 40, 13, 5, upsample=1.3), temperature=5)
    whole = Batches(mixture, CONFIG, seed=4)
    states, expected = [], []
    for _ in range(40):
        states.append(json.dumps(whole.state()))
        expected.append(next(whole))
    assert whole.epoch > 1
    for index, state in enumerate(states):
        resumed = Batches(mixture, CONFIG, seed=4)
        resumed.load_state(json.loads(state))
        assert all(same(a, b) for a, b in zip(expected[index : index + 3], resumed, strict=False))


def test_large_mixtures_are_read_without_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = parts(tmp_path, 40, 13, 5)
    mapped = [next(batches) for batches in [Batches(Mixture(made), CONFIG, seed=4)] for _ in range(30)]
    monkeypatch.setattr("kilolayer.data.mixing.MAPPED_BYTES", 0)
    assert all(same(a, b) for a, b in zip(mapped, Batches(Mixture(made), CONFIG, seed=4), strict=False))


def test_another_mixture_refuses_the_position(tmp_path: Path) -> None:
    made = parts(tmp_path, 40, 13)
    state = Batches(Mixture(made), CONFIG, seed=4).state()
    with pytest.raises(InputError, match="different data"):
        Batches(Mixture(made, temperature=5), CONFIG, seed=4).load_state(state)


def test_empty_mixtures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no pairs"):
        Mixture([])
    with pytest.raises(InputError, match="no pairs"):
        Mixture([Part(make_pairs(tmp_path / "none", []))])
