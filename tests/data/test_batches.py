"""Batches: every pair once per epoch, few fixed shapes, and a position that is restored exactly."""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kilolayer.data.batches import Batch, BatchConfig, Batches, in_order
from kilolayer.data.corpora import DataConfig, find_corpora
from kilolayer.data.encode import encode_text
from kilolayer.data.filters import FilterConfig
from kilolayer.data.shapes import Assignment, choose_shapes, make_shape
from kilolayer.data.tokenizer import TokenizerConfig, tokenizers_for
from kilolayer.errors import InputError, OptionError
from tests.data.token_pairs import Lengths, make_pairs, random_lengths

LENGTHS = st.lists(st.tuples(st.integers(2, 25), st.integers(2, 25)), min_size=1, max_size=80)


def numbers(batch: Batch) -> list[int]:
    """The pairs of a batch, each checked whole: source, what the decoder reads, what it should write."""
    found = []
    for source, target, labels in zip(batch.source.tolist(), batch.target.tolist(), batch.labels.tolist(), strict=True):
        if not any(source):
            assert not any(target)
            assert not any(labels)
            continue
        s, t = source.index(3) + 1, labels.index(3) + 1
        number = source[0]
        assert source == [number] * (s - 1) + [3] + [0] * (len(source) - s)
        assert labels == [number] * (t - 1) + [3] + [0] * (len(labels) - t)
        assert target == [2] + [number] * (t - 1) + [0] * (len(labels) - t)
        found.append(number - 10)
    return found


def same(one: Batch, other: Batch) -> bool:
    pairs = ((one.source, other.source), (one.target, other.target), (one.labels, other.labels))
    return all(torch.equal(a, b) for a, b in pairs) and one.tokens == other.tokens


@given(LENGTHS, st.integers(1, 12), st.integers(50, 600), st.integers(0, 5))
@settings(deadline=None, max_examples=60)
def test_every_pair_once_an_epoch_in_fixed_shapes(
    tmp_path_factory: pytest.TempPathFactory, lengths: Lengths, shapes: int, tokens: int, seed: int
) -> None:
    pairs = make_pairs(tmp_path_factory.mktemp("b") / "pairs", lengths)
    batches = Batches(pairs, BatchConfig(tokens=tokens, shapes=shapes), seed=seed)
    allowed = {(shape.rows, shape.source, shape.target) for shape in batches.shapes}
    assert len(allowed) == len(batches.shapes) <= shapes
    for epoch in range(2):
        epoch_batches = [next(batches) for _ in range(len(batches))]
        assert batches.epoch == epoch
        assert sorted(number for batch in epoch_batches for number in numbers(batch)) == list(range(len(lengths)))
        for batch in epoch_batches:
            assert (len(batch.source), batch.source.shape[1], batch.target.shape[1]) in allowed
            assert batch.source.numel() + batch.target.numel() <= tokens
            assert batch.tokens == int((batch.labels != 0).sum()) > 0
        real = sum(s + t for s, t in lengths)
        cells = sum(batch.source.numel() + batch.target.numel() for batch in epoch_batches)
        assert batches.padding == pytest.approx(1 - real / cells)


def test_the_position_is_restored_at_every_place(tmp_path: Path) -> None:
    pairs = make_pairs(tmp_path / "pairs", random_lengths(150))
    config = BatchConfig(tokens=200, shapes=4)
    whole = Batches(pairs, config, seed=3)
    states, expected = [], []
    for _ in range(2 * len(whole) + 5):
        states.append(json.loads(json.dumps(whole.state())))
        expected.append(next(whole))
    for index, state in enumerate(states):
        resumed = Batches(pairs, config, seed=3)
        resumed.load_state(state)
        assert resumed.state() == state
        assert all(same(a, b) for a, b in zip(islice(resumed, 3), expected[index:], strict=False))


def test_a_position_can_be_loaded_into_a_used_iterator(tmp_path: Path) -> None:
    batches = Batches(make_pairs(tmp_path / "pairs", random_lengths(60)), BatchConfig(tokens=200, shapes=3), seed=1)
    start = batches.state()
    first = [next(batches) for _ in range(40)]
    batches.load_state(start)
    assert all(same(a, b) for a, b in zip(first, batches, strict=False))


def test_seed_and_epoch_shuffle_pairs_and_batches(tmp_path: Path) -> None:
    pairs = make_pairs(tmp_path / "pairs", random_lengths(300))

    def epochs(seed: int) -> list[list[list[int]]]:
        batches = Batches(pairs, BatchConfig(tokens=300, shapes=4), seed=seed)
        return [[numbers(next(batches)) for _ in range(len(batches))] for _ in range(2)]

    assert epochs(1) == epochs(1)
    first, second = epochs(1)
    assert first != second
    assert first != epochs(2)[0]
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in second}
    widths = [max(random_lengths(300)[number][0] for number in batch) for batch in first]
    assert widths != sorted(widths)


def test_a_position_from_other_data_is_refused(tmp_path: Path) -> None:
    pairs = make_pairs(tmp_path / "pairs", random_lengths(50))
    config = BatchConfig(tokens=200, shapes=4)
    state = Batches(pairs, config, seed=1).state()
    others = [
        Batches(pairs, config, seed=2),
        Batches(pairs, BatchConfig(tokens=300, shapes=4), seed=1),
        Batches(make_pairs(tmp_path / "more", random_lengths(51)), config, seed=1),
        Batches(make_pairs(tmp_path / "other", random_lengths(50), first=1), config, seed=1),
    ]
    for other in others:
        with pytest.raises(InputError, match="the saved position belongs to different data"):
            other.load_state(state)
    own = Batches(pairs, config, seed=1)
    for wrong in ({"epoch": -1}, {"index": "3"}, {"index": None}, {"epoch": True}):
        with pytest.raises(InputError, match="not a position"):
            own.load_state({**state, **wrong})
    with pytest.raises(InputError, match="different data"):
        own.load_state({})


def test_a_batch_too_small_for_the_longest_pair_is_refused(tmp_path: Path) -> None:
    pairs = make_pairs(tmp_path / "pairs", [(5, 5), (30, 40)])
    with pytest.raises(OptionError, match="a batch of 60 tokens cannot hold 30 \\+ 40"):
        Batches(pairs, BatchConfig(tokens=60))
    with pytest.raises(OptionError, match="shapes is 0"):
        BatchConfig(shapes=0)


@given(LENGTHS, LENGTHS)
@settings(deadline=None, max_examples=60)
def test_validation_keeps_every_pair_in_a_fixed_order(
    tmp_path_factory: pytest.TempPathFactory, lengths: Lengths, training: Lengths
) -> None:
    folder = tmp_path_factory.mktemp("b")
    pairs, config = make_pairs(folder / "valid", lengths), BatchConfig(tokens=100, shapes=4)
    shapes = Batches(make_pairs(folder / "train", training), config).shapes
    for given_shapes in ((), shapes):
        once = [numbers(batch) for batch in in_order(pairs, config, given_shapes)]
        assert sorted(number for batch in once for number in batch) == list(range(len(lengths)))
        assert once == [numbers(batch) for batch in in_order(pairs, config, given_shapes)]


def test_a_part_of_the_validation_set_is_from_all_over_it_and_no_longer_than_its_own_pairs(tmp_path: Path) -> None:
    lengths = [(3, 3)] * 9 + [(40, 40)]
    pairs, config = make_pairs(tmp_path / "pairs", lengths), BatchConfig(tokens=100, shapes=4)
    shapes = Batches(make_pairs(tmp_path / "train", [(4, 4)] * 5), config).shapes
    found = list(in_order(pairs, config, shapes, most=5))
    assert sorted(number for batch in found for number in numbers(batch)) == [0, 2, 4, 6, 8]
    assert {batch.parts[0].shape[1] for batch in found} == {4}
    assert len(list(in_order(pairs, config, shapes, most=10))) > 1


@given(LENGTHS, st.integers(1, 12))
@settings(deadline=None, max_examples=60)
def test_each_pair_goes_to_the_smallest_shape_that_holds_it(lengths: Lengths, most: int) -> None:
    counted = Counter(lengths)
    shapes = choose_shapes(np.array(list(counted)), np.array(list(counted.values()), float), 500, most)
    chosen = Assignment(shapes)(*np.array(lengths).T)
    for (source, target), number in zip(lengths, chosen.tolist(), strict=True):
        fitting = [shape for shape in shapes if source <= shape.source and target <= shape.target]
        assert shapes[number].area == min(shape.area for shape in fitting)


def test_more_shapes_pad_less_and_enough_shapes_not_at_all() -> None:
    lengths, counts = np.array([(3, 4), (5, 5), (9, 4), (20, 20)]), np.array([5.0, 9, 2, 4])

    def cost(most: int) -> float:
        shapes = choose_shapes(lengths, counts, 1000, most)
        areas = np.array([shape.area for shape in shapes])
        return float((areas[Assignment(shapes)(*lengths.T)] * counts).sum())

    costs = [cost(most) for most in range(1, 6)]
    assert costs == sorted(costs, reverse=True)
    assert costs[3] == costs[4] == (lengths.sum(axis=1) * counts).sum()


def test_rows_are_multiples_of_eight_where_there_are_many() -> None:
    assert [make_shape(10, 10, tokens).rows for tokens in (19, 20, 319, 320, 499, 4096)] == [1, 1, 15, 16, 24, 200]


def test_large_files_are_read_without_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = make_pairs(tmp_path / "pairs", random_lengths(100))
    kept = list(islice(Batches(pairs, BatchConfig(tokens=200)), 20))
    monkeypatch.setattr("kilolayer.data.mixing.MAPPED_BYTES", 0)
    assert all(same(a, b) for a, b in zip(kept, Batches(pairs, BatchConfig(tokens=200)), strict=False))


@pytest.mark.slow
@pytest.mark.skipif("KILOLAYER_DATA" not in os.environ, reason="KILOLAYER_DATA names no folder of real data")
def test_multi30k_pads_at_most_15_percent_in_12_shapes(tmp_path: Path) -> None:
    folder = Path(os.environ["KILOLAYER_DATA"]) / "multi30k"
    corpora = find_corpora(DataConfig(folder=str(folder), directions=["en-de"], valid="val", test="test_2016_flickr"))
    assert [text.size for text in (*corpora.train, *corpora.valid, *corpora.test)] == [29_000, 1_014, 1_000]
    tokenizers = tokenizers_for(corpora, TokenizerConfig(kind="bpe", vocab_size=8000), tmp_path)
    assert tokenizers.source.vocab_size == 8000
    pairs = encode_text(corpora.train[0], tokenizers, tmp_path, tagged=False, filters=FilterConfig())
    batches = Batches(pairs, BatchConfig(tokens=4096, shapes=12), seed=1)
    shapes, labels, real, cells = set(), 0, 0, 0
    for batch in islice(batches, len(batches)):
        shapes.add((batch.source.shape, batch.target.shape))
        labels += batch.tokens
        real += int((batch.source != 0).sum()) + int((batch.labels != 0).sum())
        cells += batch.source.numel() + batch.labels.numel()
    assert len(shapes) <= 12
    assert labels == int(pairs.target_lengths.sum())
    assert 1 - real / cells == pytest.approx(batches.padding)
    assert batches.padding <= 0.15
