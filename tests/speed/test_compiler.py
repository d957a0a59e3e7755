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


def test_models_of_many_sizes_are_compiled_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 1)  # as after seven other models
    for dim in (4, 8):
        model = kl.Decoder(50, dim, 2, 8, 1).train()
        model.decoder.compile_layer("eager")
        batch = torch.randint(1, 50, (2, 5))
        found = model(batch).logits
        model.decoder.compiled = None
        torch.testing.assert_close(found, model(batch).logits)


def test_a_second_model_of_a_process_is_compiled_with_its_own_recomputation() -> None:
    torch._dynamo.reset()
    kept = {}
    for recompute in ("none", "layer"):
        model = kl.Decoder(50, 16, 2, 32, 1).train()
        model.decoder.recompute = recompute
        model.decoder.compile_layer("aot_eager_decomp_partition")
        kept[recompute] = _kept_by_compiled_layers(model(torch.randint(1, 50, (2, 5))).logits)
    assert kept["layer"] < kept["none"] / 2


def _kept_by_compiled_layers(output: torch.Tensor) -> int:
    """Numbers, but for weights, that compiled layers keep for the backward pass."""
    nodes: list[Any] = [output.grad_fn]
    found: dict[Any, int] = {}
    while nodes:
        node = nodes.pop()
        if node is not None and node not in found:
            tensors = node.saved_tensors if "CompiledFunction" in type(node).__name__ else ()
            found[node] = sum(tensor.numel() for tensor in tensors if not isinstance(tensor, torch.nn.Parameter))
            nodes += [following for following, _ in node.next_functions]
    return sum(found.values())
