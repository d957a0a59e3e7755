"""The best tokens of each hypothesis against a softmax and a sort in fp64."""

from __future__ import annotations

import pytest
import torch

from kilolayer.speed.operators.best_tokens import best_tokens

pytestmark = pytest.mark.filterwarnings("default")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.matrix(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocabulary", "count"), [(12, 12), (4096, 64), (8003, 10), (32_768, 10), (50_257, 4)])
def test_they_are_those_of_the_whole_distribution(vocabulary: int, count: int, dtype: torch.dtype, device: str) -> None:
    logits = torch.randn(2, 3, vocabulary)
    for row in logits.flatten(0, 1):
        peaks = torch.randperm(vocabulary)[:count]
        row[peaks] = 8 + torch.arange(len(peaks)) / 16  # all different, in bf16 too
    logits[..., 0], logits[..., 2] = 17.0, 18.0
    logits = logits.to(device, dtype)
    exact = logits.double().log_softmax(dim=-1)
    exact[..., 0] = exact[..., 2] = -torch.inf
    expected, indices = exact.sort(dim=-1, descending=True)
    found, tokens = best_tokens(logits, count, barred=(0, 2))
    assert found.dtype == torch.float32
    # On the CPU it is torch's log_softmax, which on some processors sums a vocabulary with an error of 1e-4.
    torch.testing.assert_close(found.double(), expected[..., :count], rtol=0, atol=5e-5 if device == "cuda" else 2e-4)
    distinct = count - 2  # padding and start may have been among the peaks
    assert torch.equal(tokens[..., :distinct], indices[..., :distinct])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocabulary", [12, 8192])
def test_equal_scores_are_different_tokens(vocabulary: int, device: str) -> None:
    found, tokens = best_tokens(torch.zeros(2, 2, vocabulary, device=device), 10, barred=(0, 2))
    for row in tokens.flatten(0, 1).tolist():
        assert len(set(row)) == 10
        assert not {0, 2} & set(row)
    torch.testing.assert_close(found, torch.full_like(found, -float(torch.tensor(vocabulary).log())))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocabulary", [12, 8192])
def test_a_score_that_is_no_number_is_not_hidden(vocabulary: int, device: str) -> None:
    logits = torch.randn(1, 2, vocabulary, device=device)
    logits[0, 1, 7] = torch.nan
    found, tokens = best_tokens(logits, 6, barred=(0, 2))
    assert found[0, 0].isfinite().all()
    assert found[0, 1].isnan().all()
    assert int(tokens.max()) < vocabulary
