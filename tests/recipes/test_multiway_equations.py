"""Two modalities in one encoder (`model.multiway`) under every recipe, against the recipes' equations in plain fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recipes.naive_transformer import NaiveTransformer, add_sinusoids
from tests.recipes.test_equations import EQUATIONS
from tests.recipes.tiny_models import HEADS, PADDING, SHAPES, SOURCE, build, randomise

REAL = SOURCE != PADDING
CASES = [
    pytest.param(recipe, options, equation, id="-".join([recipe, *(f"{key}={value}" for key, value in options.items())]))
    for recipe, options, equation in EQUATIONS
    if not {"cross_gain", "cross_attention"} & set(options)
]
every_recipe = pytest.mark.parametrize(("recipe", "options", "equation"), CASES)


def of_two_modalities(equation: type[NaiveTransformer], split: int) -> type[NaiveTransformer]:
    """The same equation, in which the positions from `split` on have norms and products of their own."""

    class Mixed(equation):
        def linear(self, name: str, x: Tensor) -> Tensor:
            return torch.cat([super().linear(f"{name}.A", x[:, :split]), super().linear(f"{name}.B", x[:, split:])], dim=1)

        def norm(self, name: str, x: Tensor) -> Tensor:
            return torch.cat([super().norm(f"{name}.A", x[:, :split]), super().norm(f"{name}.B", x[:, split:])], dim=1)

    return Mixed


def build_random(recipe: str, options: dict[str, Any], **model_options: Any) -> nn.Module:
    model = build("encoder", recipe, options, **model_options).eval()
    randomise(model.state_dict())
    return model


def loss_of(states: Tensor, logits: Tensor) -> Tensor:
    """A number that depends on all states and logits of real positions."""
    generator = torch.Generator().manual_seed(1)
    values = torch.cat([states[REAL].flatten(), logits[REAL].flatten()])
    return (values * torch.randn(values.shape, generator=generator, dtype=torch.float64)).sum()


@pytest.mark.matrix(6)
@pytest.mark.parametrize("split", [1, 4])
@every_recipe
def test_two_modalities_compute_the_equation(
    recipe: str, options: dict[str, Any], equation: type[NaiveTransformer], split: int
) -> None:
    model = build_random(recipe, options, multiway=2)
    weights = {name: value.detach().clone().requires_grad_() for name, value in model.state_dict().items()}
    reference = of_two_modalities(equation, split)(weights, SHAPES["encoder"], HEADS, **options)
    states = reference.encode(reference.embed(SOURCE), REAL)
    logits = states @ reference.weight("embedding.weight").T
    loss_of(states, logits).backward()
    found = model(SOURCE, split=split)
    loss_of(found.states, found.logits).backward()
    torch.testing.assert_close(found.states[REAL], states[REAL], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.logits[REAL], logits[REAL], rtol=1e-12, atol=1e-12)
    assert not reference.unread, "the model has weights that its equation does not"
    for name, weight in model.named_parameters():
        expected = weights[name].grad
        assert expected is not None
        if name == "embedding.weight":
            expected[PADDING] = 0 if weight.grad is None else weight.grad[PADDING]  # its row is not trained from the input
        torch.testing.assert_close(weight.grad, expected, rtol=1e-11, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.matrix(6)
@every_recipe
@pytest.mark.parametrize(("way", "split"), [("A", SOURCE.shape[1]), ("B", 0)])
def test_one_modality_is_the_model_of_its_weights(
    recipe: str, options: dict[str, Any], equation: type[NaiveTransformer], way: str, split: int
) -> None:
    both = build_random(recipe, options, multiway=2, positions="learned", max_length=6, qk_norm=True)
    alone = build("encoder", recipe, options, positions="learned", max_length=6, qk_norm=True).eval()
    other = {"A": "B", "B": "A"}[way]
    own = {name.replace(f".{way}.", "."): value for name, value in both.state_dict().items() if f".{other}." not in name}
    alone.load_state_dict(own)
    found, expected = both(SOURCE, split=split), alone(SOURCE)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-12, atol=1e-12)
    loss_of(found.states, found.logits).backward()
    loss_of(expected.states, expected.logits).backward()
    gradients = {name: weight.grad for name, weight in both.named_parameters()}
    assert all(gradients[name] is None for name in gradients if f".{other}." in name)
    for name, weight in alone.named_parameters():
        mine = next(each for ours, each in gradients.items() if ours.replace(f".{way}.", ".") == name)
        torch.testing.assert_close(mine, weight.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("split", [2, 4])
def test_positions_at_the_input_are_counted_in_each_modality(split: int) -> None:
    model = build_random("post_ln", {}, multiway=2, positions="sinusoidal")
    reference = of_two_modalities(naive_post_ln(), split)(model.state_dict(), SHAPES["encoder"], HEADS)
    embedded = reference.embed(SOURCE)
    parts = [add_sinusoids(embedded[:, part], REAL[:, part]) for part in (slice(None, split), slice(split, None))]
    expected = reference.encode(torch.cat(parts, dim=1), REAL)
    torch.testing.assert_close(model(SOURCE, split=split).states[REAL], expected[REAL], rtol=1e-12, atol=1e-12)


def naive_post_ln() -> type[NaiveTransformer]:
    return next(equation for recipe, _, equation in EQUATIONS if recipe == "post_ln")
