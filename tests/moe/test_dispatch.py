"""The way to the experts and back."""

from __future__ import annotations

import pytest
import torch

from kilolayer.moe.dispatch import Dispatch, capacity_of

NOWHERE = 3
CHOSEN = torch.tensor([[2, 0], [0, 2], [NOWHERE, NOWHERE], [0, NOWHERE], [2, 0]])


def test_rows_lie_by_expert_first_choices_first() -> None:
    dispatch = Dispatch.of(CHOSEN, 3)
    assert dispatch.groups.ends.tolist() == [4, 4, 7]
    assert dispatch.groups.ends.dtype == torch.int32
    assert dispatch.load.tolist() == [4, 0, 3]
    rows = dispatch.gather(torch.arange(5.0)[:, None])[:, 0].tolist()
    assert rows[:4] == [1, 3, 0, 4]  # expert 0: the first choices of 1 and 3, the second ones of 0 and 4
    assert rows[4:7] == [0, 4, 1]
    assert dispatch.groups.of_row[:7].tolist() == [0, 0, 0, 0, 2, 2, 2]
    assert dispatch.queue().tolist()[0] == [0, 2]
    assert dispatch.queue().tolist()[1] == [0, 2]
    assert dispatch.queue().tolist()[3][0] == 1
    assert dispatch.queue().tolist()[4] == [1, 3]


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_what_is_gathered_is_combined_again(top_k: int) -> None:
    chosen = torch.stack([torch.randperm(5)[:top_k] for _ in range(11)])
    dispatch = Dispatch.of(chosen, 5)
    x = torch.randn(11, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(11, top_k, dtype=torch.float64, requires_grad=True)
    scales = torch.rand(5, dtype=torch.float64)[dispatch.groups.of_row, None]

    def there_and_back(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return dispatch.combine(dispatch.gather(x) * scales, weights)

    by_expert = torch.empty(5, dtype=torch.float64).scatter(0, dispatch.groups.of_row, scales[:, 0])
    expected = x * (weights * by_expert[chosen]).sum(dim=1, keepdim=True)
    torch.testing.assert_close(there_and_back(x, weights), expected)
    assert torch.autograd.gradcheck(there_and_back, (x, weights))


@pytest.mark.parametrize(
    ("experts", "top_k", "factor", "tokens", "expected"),
    [
        (4, 1, 1.0, 16, 4),
        (4, 1, 1.0, 17, 5),  # ceil(17 / 4)
        (4, 2, 1.25, 16, 10),
        (4, 2, 1.0, 17, 10),
        (100, 1, 0.29, 10_000, 29),
        (8, 1, 0.5, 3, 1),
        (8, 2, 1.0, 0, 1),
    ],
)
def test_capacity(experts: int, top_k: int, factor: float, tokens: int, expected: int) -> None:
    assert int(capacity_of(experts, top_k, factor, torch.tensor(tokens))) == expected
