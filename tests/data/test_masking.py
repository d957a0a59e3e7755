"""Masks: how many, where, what stands there; drawn anew each epoch, the same in a run that was resumed."""

from __future__ import annotations

from itertools import groupby, islice
from pathlib import Path

import numpy as np
import pytest
import torch

from kilolayer.config import build
from kilolayer.data.masking import MaskedText, Masker, MaskingConfig, fixed_masks, span_lengths
from kilolayer.data.packing import Documents, FixedRows, PackedText
from kilolayer.errors import InputError, OptionError
from tests.data.made_text import made_text

VOCABULARY = 1000
MASK = 1000


def made_rows(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Rows of one to four pieces, padded, and one of padding alone."""
    tokens = np.zeros((rows, length), np.int64)
    for row in tokens[:-1]:
        place = 0
        for _ in range(int(rng.integers(1, 5))):
            size = int(rng.integers(3, length // 3))
            if place + size > length:
                break
            row[place : place + size] = [2, *rng.integers(4, VOCABULARY, size - 2), 3]
            place += size
    return tokens


@pytest.mark.matrix(3)
@pytest.mark.parametrize("span", [1.0, 3.0])
@pytest.mark.parametrize("rate", [0.01, 0.15, 0.5, 0.9])
def test_exactly_the_share_of_each_row_is_hidden_and_told(rate: float, span: float) -> None:
    rng = np.random.default_rng(1)
    masker = Masker(MaskingConfig(rate=rate, span=span), 60, VOCABULARY)
    assert masker.most == max(1, round(rate * 58))
    for _ in range(20):
        tokens = made_rows(rng, 8, 60)
        before = tokens.copy()
        masked, positions, labels = masker.mask_tokens(tokens, rng)
        assert np.array_equal(tokens, before)
        assert positions.shape == labels.shape == (8, masker.most)
        for row, hidden, where, what in zip(tokens.tolist(), masked.tolist(), positions.tolist(), labels.tolist(), strict=True):
            ordinary = [place for place, token in enumerate(row) if token > 3]
            count = max(1, round(rate * len(ordinary))) if ordinary else 0
            changed = [place for place in range(60) if hidden[place] != row[place]]
            assert len(changed) == count
            assert set(changed) <= set(ordinary)
            assert all(hidden[place] == MASK for place in changed)
            assert where == changed + [0] * (masker.most - count)  # in order
            assert what == [row[place] for place in changed] + [0] * (masker.most - count)


def test_eight_in_ten_are_masked_one_stays_and_one_is_another() -> None:
    rng = np.random.default_rng(2)
    tokens = np.full((400, 500), 7)
    tokens[:, 0], tokens[:, -1] = 2, 3
    masked, positions, labels = Masker(MaskingConfig(keep=0.1, random=0.1), 500, VOCABULARY).mask_tokens(tokens, rng)
    found = np.take_along_axis(masked, positions, 1)
    total = labels.size
    assert (labels == 7).all()
    assert total == 400 * 75
    # Five standard deviations of a binomial count.
    for share, count in ((0.8, (found == MASK).sum()), (0.1 + 0.1 / 996, (found == 7).sum())):
        assert abs(count - share * total) < 5 * (share * (1 - share) * total) ** 0.5
    others = found[(found != MASK) & (found != 7)]
    assert set(others.tolist()) <= set(range(4, VOCABULARY)) - {7}
    assert len(set(others.tolist())) > 900
    visible = masked.copy()
    np.put_along_axis(visible, positions, 7, 1)
    visible[:, 0] = 2
    assert np.array_equal(visible, tokens)


@pytest.mark.parametrize("span", [1.0, 3.0])
def test_every_token_is_hidden_equally_often(span: float) -> None:
    rng = np.random.default_rng(3)
    tokens = np.full((20_000, 24), 7)
    tokens[:, 0], tokens[:, 11], tokens[:, 12], tokens[:, -1] = 2, 3, 2, 3  # two pieces
    masked, _, _ = Masker(MaskingConfig(rate=0.2, span=span), 24, VOCABULARY).mask_tokens(tokens, rng)
    counts = (masked == MASK).sum(axis=0)
    ordinary = tokens[0] > 3
    assert not counts[~ordinary].any()
    expected = 20_000 * 4 / 20
    assert np.abs(counts[ordinary] - expected).max() < 5 * (expected * 0.8) ** 0.5


def runs(hidden: np.ndarray) -> list[int]:
    """The lengths of what is hidden together."""
    return [sum(1 for _ in group) for row in hidden.tolist() for masked, group in groupby(row) if masked]


@pytest.mark.parametrize("mean", [2.0, 3.0, 4.5])
def test_spans_have_the_mean_and_are_geometric(mean: float) -> None:
    rng = np.random.default_rng(4)
    tokens = np.full((40, 20_002), 7)
    tokens[:, 0], tokens[:, -1] = 2, 3
    # So few that hardly two spans touch, and so many that the last one, which is cut, hardly counts.
    masked, _, _ = Masker(MaskingConfig(rate=0.02, span=mean), 20_002, VOCABULARY).mask_tokens(tokens, rng)
    found = np.array(runs(masked == MASK))
    assert found.mean() == pytest.approx(mean, rel=0.03)
    assert (found > 10).mean() < 0.03
    counts = np.bincount(found)[1:6]
    ratios = counts[1:] / counts[:-1]
    assert ratios == pytest.approx(ratios.mean(), rel=0.15)


def test_lengths_of_spans_are_probabilities_with_the_mean() -> None:
    for mean in (1.0, 1.5, 3.0, 5.0):
        shares = span_lengths(mean)
        assert shares.sum() == pytest.approx(1)
        assert shares @ np.arange(1, len(shares) + 1) == pytest.approx(mean)


@pytest.mark.parametrize("keep_random", [{}, {"keep": 0.1, "random": 0.1}], ids=str)
def test_masks_are_drawn_anew_each_epoch_and_a_resumed_run_draws_the_same(tmp_path: Path, keep_random: dict) -> None:
    text, _ = made_text(tmp_path / "a", [40, 3, 7, 90, 12])

    def masked_text(seed: int = 0, **options: float) -> MaskedText:
        packed = PackedText(Documents(text), 4, 16, seed)
        return MaskedText(packed, Masker(MaskingConfig(**{**keep_random, **options}), 16, 200))

    batches = masked_text()
    first = [torch.cat([batch.labels.flatten() for batch in islice(batches, len(batches))]) for _ in range(3)]
    assert len({frozenset(each.tolist()) for each in first}) == 3
    assert (batches.epoch, batches.index) == (2, len(batches))
    next(batches)
    state = batches.state()
    expected = [batch.parts for batch in islice(batches, 15)]
    again = masked_text()
    again.load_state(state)
    for parts, batch in zip(expected, islice(again, 15), strict=True):
        assert len(parts) == len(batch.parts)
        assert all(map(torch.equal, parts, batch.parts))
        assert batch.tokens == (parts[-1] != 0).sum()
    for other in (masked_text(1), masked_text(rate=0.2), masked_text(span=2.0)):
        with pytest.raises(InputError, match="another seed"):
            other.load_state(state)


def test_the_same_row_is_masked_otherwise_in_the_next_epoch_and_under_another_seed(tmp_path: Path) -> None:
    text, _ = made_text(tmp_path / "a", [14])  # one row, the same in each epoch
    masker = Masker(MaskingConfig(), 16, 200)
    by_seed = [
        [next(batches).positions[0].tolist() for _ in range(12)]
        for batches in (MaskedText(PackedText(Documents(text), 1, 16, seed), masker) for seed in (0, 1))
    ]
    assert all(len(set(map(tuple, epochs))) > 6 for epochs in by_seed)
    assert by_seed[0] != by_seed[1]


def test_parts_tell_by_their_number_what_rows_have(tmp_path: Path) -> None:
    text, _ = made_text(tmp_path / "a", [14, 14, 14, 3, 4, 9])
    batches = MaskedText(PackedText(Documents(text), 1, 16), Masker(MaskingConfig(), 16, 200))
    found = {}
    for batch in islice(batches, len(batches)):
        found[len(batch.parts)] = batch
        tokens, *seen, positions, labels = batch.parts
        assert positions.shape == labels.shape == (1, 2)
        assert [each.dtype for each in seen] == [torch.bool, torch.int64][: len(seen)]
        assert all(each.shape == tokens.shape for each in seen)
    assert set(found) == {3, 4, 5}  # a full row, a padded one, and two documents in one


def test_held_out_masks_never_change_and_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    text, _ = made_text(tmp_path / "a", [40, 3, 7, 90, 12])
    masker = Masker(MaskingConfig(keep=0.1, random=0.1, span=2.0), 16, 200)

    def drawn(size: int, most: int | None = None) -> list[torch.Tensor]:
        batches = list(fixed_masks(FixedRows(Documents(text), 16), masker, size, most))
        return [torch.cat([getattr(batch, name) for batch in batches]) for name in ("positions", "labels")] + [
            torch.cat([batch.packed.tokens for batch in batches])
        ]

    whole = drawn(1)
    for size in (2, 5, 100):
        assert all(map(torch.equal, drawn(size), whole))
    assert all(torch.equal(found, each[:6]) for found, each in zip(drawn(4, 6), whole, strict=True))
    assert len(set(map(tuple, whole[0].tolist()))) > 3  # not the same positions in each row


def test_bad_shares_are_refused() -> None:
    with pytest.raises(OptionError, match=r"keep and random are 1\.2 together"):
        MaskingConfig(keep=0.6, random=0.6)
    for bad in ({"rate": 0.0}, {"rate": 0.95}, {"span": 0.5}, {"span": 6.0}, {"keep": -0.1}, {"random": 1.1}):
        with pytest.raises(OptionError):
            build(MaskingConfig, bad)
