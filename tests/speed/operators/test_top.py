"""The largest numbers, found block by block, are torch's."""

from __future__ import annotations

import pytest
import torch

from kilolayer.speed.operators.top import BLOCK, top


@pytest.mark.parametrize("numbers", [3, BLOCK, 4 * BLOCK + 1, 40 * BLOCK, 41 * BLOCK - 1, 8003])
@pytest.mark.parametrize("count", [1, 2, 10])
@pytest.mark.parametrize("impossible", [0.0, 0.5, 0.999])
def test_blocks_lose_nothing(numbers: int, count: int, impossible: float) -> None:
    values = torch.randn(7, numbers).masked_fill(torch.rand(7, numbers) < impossible, float("-inf"))
    best, indices = top(values, min(count, numbers))
    assert torch.equal(best, values.topk(min(count, numbers)).values)
    assert torch.equal(values.gather(1, indices), best)
    assert all(len(set(row)) == len(row) for row in indices.tolist())


def test_equal_numbers_are_found_at_different_places() -> None:
    _, indices = top(torch.zeros(2, 50 * BLOCK), 10)
    assert all(len(set(row)) == 10 for row in indices.tolist())


def test_a_nan_comes_out_first() -> None:
    values = torch.randn(1, 50 * BLOCK)
    values[0, 777] = float("nan")
    best, indices = top(values, 3)
    assert best[0, 0].isnan()
    assert indices[0, 0] == 777
