"""Small models, and what they compute: for the comparison of a plain model with its fast form."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import kilolayer as kl

AnyModel = kl.Encoder | kl.Decoder | kl.EncoderDecoder
SHAPES = ("encoder", "decoder", "encoder_decoder")
SIZES = {"dim": 16, "heads": 2, "ffn_dim": 24, "layers": 3, "vocab_size": 11}
SPARSE = kl.MoE(experts=4)
# Padded on the right and on the left.
SOURCE = torch.tensor([[3, 5, 2, 9, 4, 0], [0, 0, 7, 1, 8, 6], [2, 2, 10, 3, 1, 9]])
TARGET = torch.tensor([[1, 6, 0, 0, 0], [0, 4, 2, 7, 3], [5, 1, 9, 9, 10]])


class Results(NamedTuple):
    """logits: those of real positions, [positions, vocabulary]; gradients: of all parameters, by name."""

    logits: Tensor
    gradients: dict[str, Tensor]


def build(shape: str, recipe: Any = "deepnorm", *, device: str = "cpu", dtype: Any = torch.float64, **options: Any) -> Any:
    """A model in training mode; no parameter is at a start, such as 0 or 1, that would hide a mistake."""
    config = kl.ModelConfig(shape=shape, recipe=kl.recipes.parse(recipe), **{**SIZES, **options})  # pyright: ignore
    model = kl.build_model(config, device=device, dtype=dtype, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator).to(weight)
    return model.train()


def batch_of(model: AnyModel) -> tuple[Tensor, ...]:
    """A padded batch: source and target, or the source alone."""
    device = next(model.parameters()).device
    return tuple(each.to(device) for each in ((SOURCE, TARGET) if isinstance(model, kl.EncoderDecoder) else (SOURCE,)))


def run(model: AnyModel, batch: tuple[Tensor, ...] | None = None, **options: Any) -> Results:
    """Forward and backward; the gradients are those of a random combination of the logits, and of the router's losses."""
    batch = batch_of(model) if batch is None else batch
    model.zero_grad()
    out = model(*batch, **options)
    assert out.logits is not None
    logits = out.logits[batch[-1] != 0]
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(logits.device)
    ((logits.double() * direction).sum() + out.router_loss.double()).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return Results(logits.detach(), gradients)


def assert_equal(found: Results, expected: Results, tolerance: float = 1e-9) -> None:
    """All numbers, within `tolerance` of the largest of each tensor, or of 1."""
    assert found.gradients.keys() == expected.gradients.keys()
    assert_close(found.logits, expected.logits, tolerance, "logits")
    for name, gradient in expected.gradients.items():
        assert_close(found.gradients[name], gradient, tolerance, name)


def assert_close(found: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    scale = max(1.0, float(expected.abs().max()))
    error = float((found.double() - expected.double()).abs().max())
    assert error <= tolerance * scale, f"{name} differs by {error} at a scale of {scale}"


def errors(found: Results, exact: Results) -> tuple[float, float]:
    """Of the logits, and of all gradients together, relative to their norms in `exact`."""
    names = exact.gradients.keys()
    assert found.gradients.keys() == names
    gradients, expected = (torch.cat([each.gradients[name].double().flatten() for name in names]) for each in (found, exact))
    return _relative(found.logits, exact.logits), _relative(gradients, expected)


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def exact_form(model: AnyModel) -> AnyModel:
    """A copy in fp64, with the numbers that the parameters of `model` have now."""
    exact = kl.build_model(model.config, device=next(model.parameters()).device, dtype=torch.float64, seed=0)
    exact.load_state_dict(model.state_dict())
    return exact.train(model.training)
