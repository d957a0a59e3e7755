"""The statistics that the loss takes of each row of scores."""

from __future__ import annotations

import pytest
import torch

from kilolayer.speed.operators.score_statistics import score_statistics

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
CLOSE = {"cpu": {"rtol": 1e-5, "atol": 1e-6}, "cuda": {"rtol": 1e-2, "atol": 1e-2}}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 7), (13, 40), (5, 4096), (3, 5001), (2, 50_304)])
def test_statistics_and_gradients(rows: int, vocabulary: int, device: str) -> None:
    scores = (3 * torch.randn(rows, vocabulary, device=device)).to(DTYPES[device]).requires_grad_()
    labels = torch.randint(vocabulary, (rows,), device=device)
    weights = torch.randn(3, rows, device=device)
    found = score_statistics(scores, labels)
    exact = scores.detach().double().requires_grad_()
    expected = (exact.logsumexp(dim=1), exact[torch.arange(rows), labels], exact.mean(dim=1))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    sum((weight * each).sum() for weight, each in zip(weights, found, strict=True)).backward()
    sum((weight * each).sum() for weight, each in zip(weights.double(), expected, strict=True)).backward()
    assert scores.grad is not None
    assert torch.equal(scores.detach(), scores.grad)
    assert exact.grad is not None
    torch.testing.assert_close(scores.grad.double(), exact.grad, **CLOSE[device])


@pytest.mark.parametrize("device", DEVICES)
def test_scores_that_are_not_finite_are_not_hidden(device: str) -> None:
    scores = torch.zeros(4, 10, device=device)
    scores[0, 3], scores[1, 3], scores[2, 3] = float("nan"), float("inf"), float("-inf")
    total = score_statistics(scores, torch.zeros(4, dtype=torch.int64, device=device))[0]
    assert not total[:2].isfinite().any()
    torch.testing.assert_close(total[2:].cpu(), torch.tensor([9.0, 10.0]).log())
