"""Recipes that change how the state travels from layer to layer: what they carry, how it learns, and their depth."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import kilolayer as kl
from kilolayer.layers.feedforward import FeedForward
from kilolayer.layers.initialize import initialize
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.stream import make_stream, state_of
from kilolayer.layers.sublayer import ExtendedSublayer, Sublayer
from kilolayer.optimizers.recipe_rates import recipe_rates
from kilolayer.optimizers.weight_factors import layer_rates
from kilolayer.probe.propagation import first_over_last
from kilolayer.recipes.base import Depths, Kind, Place, Rates
from tests.recipes.tiny_models import build

SUBLAYERS, WIDTH = 1000, 128


class FeedForwards(nn.Module):
    """Layers of one feed-forward sublayer each, in a recipe's stream, without the attention between them."""

    def __init__(self, name: str, layers: int) -> None:
        super().__init__()
        options, recipe, depths = LayerOptions(dim=WIDTH, heads=1, ffn_dim=2 * WIDTH), kl.recipes.get(name), Depths(layers)
        stream = recipe.stream()
        kind = ExtendedSublayer if stream is not None and stream.has_second else Sublayer
        plans = [recipe.plan(Place(Kind.FEEDFORWARD, "encoder", layer, depths)) for layer in range(1, layers + 1)]
        self.layers = nn.ModuleList(kind(FeedForward(options, plan), options, plan) for plan in plans)
        self.stream = make_stream(stream, layers, options)

    def forward(self, x: Tensor) -> Tensor:
        history = self.stream.begin(x)
        for index, layer in enumerate(self.layers):
            history = self.stream.write(history, layer(self.stream.read(history, index)))
        return self.stream.end(history)

    def gradient_ratio(self, seed: int) -> float:
        """The gradient of the first twentieth of the layers over that of the last, at the start."""
        initialize(self, seed)
        generator = torch.Generator().manual_seed(seed)
        x, direction = torch.randn(2, 1, 16, WIDTH, generator=generator)
        self.zero_grad()
        (self(x) * direction).sum().backward()
        matrices = [[weight for weight in layer.parameters() if weight.dim() == 2] for layer in self.layers]
        norms = [torch.stack([weight.grad.norm() for weight in each if weight.grad is not None]).norm() for each in matrices]
        return first_over_last(tuple(map(float, norms)), share=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least", "most"), [("b2t", 0.1, 3.0), ("resi_dual", 0.1, 50.0)])
def test_the_gradient_reaches_the_first_of_a_thousand_sublayers(name: str, least: float, most: float) -> None:
    ratios = [FeedForwards(name, SUBLAYERS).gradient_ratio(seed) for seed in range(3)]
    assert all(least < ratio < most for ratio in ratios), ratios


SIDES = ("encoder", "decoder")


def test_the_weight_of_the_state_learns_slowly_and_the_plan_tells_it() -> None:
    rates = kl.recipes.get("x0_residual").unusual_rates(Depths(3, 2), WIDTH)
    assert rates == {f"{side} keep": Rates(lr=0.01) for side in SIDES}
    model = build("encoder_decoder", "x0_residual")
    slow = {name for name, weight in model.named_parameters() if recipe_rates(model).get(weight) == Rates(lr=0.01)}
    assert slow == {name for name in model.state_dict() if ".stream.keep." in name}
    assert len(slow) == 3 + 2


def test_the_weights_of_a_layers_state_and_input_decay_with_the_layer() -> None:
    model = build("encoder_decoder", "x0_residual")
    rates = layer_rates(model, 0.5)
    named = dict(model.named_parameters())
    for side, layers in (("encoder", 3), ("decoder", 2)):
        for layer in range(layers):
            for name in ("stream.keep", "stream.add"):
                assert rates[named[f"{side}.{name}.{layer}.weight"]] == 0.5 ** (layers - 1 - layer)


@pytest.mark.parametrize("recipe", ["b2t", "resi_dual", "x0_residual"])
def test_hidden_states_are_the_states_between_layers(recipe: str) -> None:
    model = build("encoder", recipe).eval()
    tokens = torch.tensor([[3, 5, 2, 9]])
    seen: list[Tensor] = []
    for block in model.encoder.blocks:
        block.register_forward_hook(lambda _, inputs, output: seen.append(state_of(output.states)))
    out = model(tokens, hidden_states=True)
    assert len(out.hidden_states) == 1 + len(seen) == 4
    for state, expected in zip(out.hidden_states[1:], seen, strict=True):
        assert torch.equal(state, expected)
    assert all(state.shape == (1, 4, 8) for state in out.hidden_states)


def test_the_scale_of_the_sum_changes_nothing_but_the_eps_of_its_norm() -> None:
    tokens = torch.tensor([[3, 5, 2, 9]])
    whole, scaled = (build("encoder", "resi_dual", {"scale": each}, norm_eps=1e-30).eval() for each in (1.0, 0.01))
    scaled.load_state_dict(whole.state_dict())
    torch.testing.assert_close(scaled(tokens).states, whole(tokens).states, rtol=1e-9, atol=1e-9)
