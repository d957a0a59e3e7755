"""Scores at some places of a sequence alone: what a masked language model is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.errors import OptionError
from kilolayer.speed.fast import fast_form

TOKENS = torch.tensor([[3, 5, 2, 9, 4, 0], [2, 2, 10, 3, 1, 9]])
POSITIONS = torch.tensor([[1, 3, 0], [5, 5, 2]])  # a place may come twice


def encoder(**options: Any) -> kl.Encoder:
    torch.manual_seed(0)
    return kl.Encoder(11, dim=16, heads=2, ffn_dim=24, layers=2, dtype=torch.float64, **options)


def gradients(model: kl.Encoder, direction: torch.Tensor, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (logits * direction).sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("options", [{}, {"tie_embeddings": False}, {"moe": kl.MoE(experts=2)}], ids=str)
@pytest.mark.parametrize("fast", [False, True])
def test_scores_and_gradients_are_those_of_the_whole_sequence_at_these_places(fast: bool, options: dict[str, Any]) -> None:
    plain = encoder(**options)
    model = fast_form(plain) if fast else plain
    whole, some = plain(TOKENS), model(TOKENS, positions=POSITIONS)
    expected = torch.stack([torch.stack([whole.logits[row, place] for place in POSITIONS[row].tolist()]) for row in range(2)])
    assert some.logits.shape == (2, 3, 11)
    torch.testing.assert_close(some.logits, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(some.states, whole.states, rtol=1e-12, atol=1e-12)
    direction = torch.randn(some.logits.shape, dtype=torch.float64)
    found, wanted = gradients(plain, direction, some.logits), gradients(plain, direction, expected)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)


def test_xpos_refuses_fp16_under_autocast_too() -> None:
    model, tokens = kl.Decoder(20, 8, 2, 16, 2, positions="xpos"), torch.ones(1, 4, dtype=torch.int64)
    with torch.autocast("cpu", torch.float16), pytest.raises(OptionError, match="xPos scales keys beyond the range of fp16"):
        model(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(tokens).logits.isfinite().all()
