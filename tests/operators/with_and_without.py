"""A model with operators of our own beside the same model without them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kilolayer as kl


def loss_and_gradient(model: kl.EncoderDecoder, source: Tensor, target: Tensor) -> tuple[float, Tensor]:
    model.zero_grad()
    out = model(source, target)
    loss = F.cross_entropy(out.logits.float()[target != 0], target[target != 0]) + out.router_loss
    loss.backward()
    gradients = [weight.grad for weight in model.parameters()]
    return float(loss.detach()), torch.cat([each.flatten().float() for each in gradients if each is not None])


def assert_same(model: kl.EncoderDecoder, serve: Callable[[bool], None], tolerance: float, *, compiled: bool = False) -> None:
    """The same loss and gradients on batches of two shapes, whether the operators serve, compiled or not, or do not."""
    found, device = {}, model.embedding.weight.device
    for served in (False, True):
        serve(served)
        for stack in model.stacks() if served and compiled else []:
            stack.compile_layer("aot_eager")
        for length in (20, 33):
            source, target = torch.randint(1, 50, (2, 6, length), generator=torch.Generator().manual_seed(length)).to(device)
            source[2, 11:], target[3, 7:] = 0, 0
            found[served, length] = loss_and_gradient(model, source, target)
    for length in (20, 33):
        (loss, gradient), (expected, expected_gradient) = found[True, length], found[False, length]
        assert loss == pytest.approx(expected, rel=tolerance)
        assert float(F.cosine_similarity(gradient, expected_gradient, dim=0)) > 1 - min(tolerance, 1e-3)
