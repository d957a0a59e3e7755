"""One compiled layer serves all layers of a stack, whatever the batch's shape and the layer's own numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kilolayer as kl

SHAPES = [(8, 16, 24), (4, 24, 24), (2, 40, 16), (120, 17, 17), (3, 33, 48)]
QUICK = ("deepnorm", "admin", "dlcl")  # a number, a vector of each layer's own, a combination of layers

pytestmark = pytest.mark.filterwarnings("default")  # the compiler warns about itself


def random_batch(rows: int, source_length: int, target_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    source, target = torch.randint(1, 50, (rows, source_length)), torch.randint(1, 50, (rows, target_length))
    source[0, -3:], target[0, -2:] = 0, 0
    return source, target


def gradients(model: kl.EncoderDecoder, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(*batch).logits.logsumexp(-1).mean().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        *(pytest.param(recipe, {}, marks=() if recipe in QUICK else pytest.mark.slow) for recipe in kl.recipes.names()),
        ("deepnorm", {"drop_path": 0.3, "dropout": 0.1, "activation_dropout": 0.1}),
        ("sub_ln", {"positions": "rotary", "activation": "swiglu", "norm": "rms"}),
        ("deepnorm", {"positions": "t5", "kv_heads": 1}),
    ],
)
def test_a_layer_is_compiled_once_for_all_layers_and_shapes(recipe: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = kl.EncoderDecoder(50, 16, 2, 32, 3, 3, recipe, **options).train()
    for stack in model.stacks():
        stack.compile_layer("aot_eager")
    for shape in SHAPES:
        batch = random_batch(*shape)
        found = gradients(model, batch)
        if not any("drop" in name for name in options):
            kept = {stack: stack.compiled for stack in model.stacks()}
            for stack in kept:
                stack.compiled = None
            expected = gradients(model, batch)
            for stack, compiled in kept.items():
                stack.compiled = compiled
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
