"""Scores over the vocabulary: in fp32 wherever no gradient is asked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kilolayer as kl
from kilolayer.layers.embedding import scores_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def random_factors(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    states = 4 * torch.randn(3, 5, 64, device=device)
    return states, torch.randn(97, 64, device=device).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_scores_of_a_rounded_table_are_not_rounded(dtype: torch.dtype, device: str) -> None:
    states, table = random_factors(dtype, device)
    exact = states.to(dtype).double() @ table.double().t()
    with torch.no_grad():
        found = scores_of(states, table)
    assert found.dtype == torch.float32
    error, rounded = (float((each.double() - exact).abs().max()) for each in (found, exact.to(dtype)))
    assert error < 1e-4
    assert rounded > 100 * error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("device", DEVICES)
def test_training_holds_them_in_the_dtype_of_the_table(dtype: torch.dtype, device: str) -> None:
    states, table = random_factors(dtype, device)
    found = scores_of(states, table.requires_grad_())
    assert found.dtype == dtype
    torch.testing.assert_close(found, (states.to(dtype).double() @ table.double().t()).to(dtype), rtol=1e-2, atol=1e-3)


def test_a_model_gives_fp32_logits_where_no_gradient_is_asked() -> None:
    tokens = torch.arange(1, 9)[None]
    for tied in (True, False):
        model = kl.Decoder(vocab_size=50, dim=16, heads=2, ffn_dim=32, layers=2, tie_embeddings=tied).eval()
        model.cast_weights(torch.bfloat16)
        assert model(tokens).logits.dtype == torch.bfloat16
        with torch.inference_mode():
            assert model(tokens).logits.dtype == torch.float32
