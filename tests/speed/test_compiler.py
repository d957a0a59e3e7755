"""One compiled layer serves all layers of a kind, whatever the batch's shape and the layer's own numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._functorch import config as partition_config
from torch.fx.experimental import _config as shape_config

import kilolayer as kl
from kilolayer.speed.compiler import Recompute
from kilolayer.speed.fast import compile_layers, fast_form
from kilolayer.speed.operators import kernels
from tests.speed.plain_and_fast import SPARSE

SHAPES = [(8, 16, 24), (4, 24, 24), (2, 40, 16), (120, 17, 17), (3, 33, 48)]
QUICK = ("deepnorm",)
DROPOUT = {"drop_path": 0.3, "dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}

pytestmark = pytest.mark.filterwarnings("default")  # the compiler warns about itself


def random_batch(rows: int, source_length: int, target_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    source, target = torch.randint(1, 50, (rows, source_length)), torch.randint(1, 50, (rows, target_length))
    source[0, -3:], target[0, -2:] = 0, 0
    return source, target


def gradients(model: kl.EncoderDecoder, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    out = model(*batch)
    (out.logits[batch[1] != 0].float().logsumexp(-1).mean() + out.router_loss).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def compiled_form(model: Any, recompute: Recompute = "none", backend: str = "aot_eager") -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    form = fast_form(model, recompute)
    compile_layers(form, backend)
    return form


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        *(pytest.param(recipe, {}, marks=() if recipe in QUICK else pytest.mark.slow) for recipe in kl.recipes.names()),
        pytest.param("deepnorm", DROPOUT, marks=pytest.mark.slow),
        pytest.param("sub_ln", {"positions": "rotary", "activation": "swiglu", "norm": "rms"}, marks=pytest.mark.slow),
        pytest.param("deepnorm", {"positions": "t5", "kv_heads": 1}, marks=pytest.mark.slow),
    ],
)
def test_a_layer_is_compiled_once_for_all_layers_and_shapes(recipe: str, options: dict[str, Any]) -> None:
    model = kl.EncoderDecoder(50, 16, 2, 32, 3, 3, recipe, **options).train()
    form = compiled_form(model)
    for shape in SHAPES:
        batch = random_batch(*shape)
        found = gradients(form, batch)
        if not options.get("dropout"):
            for name, gradient in gradients(model, batch).items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    layouts = {"mix_ln": 2}.get(recipe, 1)  # within a stack
    assert graphs() == 2 * layouts


@pytest.mark.parametrize(
    ("recipe", "options", "kinds"),
    [
        pytest.param("pre_ln", DROPOUT, 2, marks=pytest.mark.slow),
        pytest.param("pre_ln", {}, 2, marks=pytest.mark.slow),
        pytest.param("keel", {}, 2, marks=pytest.mark.slow),
        pytest.param("peri_ln", {}, 2, marks=pytest.mark.slow),
        pytest.param("deepnorm", DROPOUT, 2, marks=pytest.mark.slow),
        pytest.param("sub_ln", {"moe": SPARSE}, 4, marks=pytest.mark.slow),
        pytest.param("sub_ln", {"moe": SPARSE, **DROPOUT}, 4, marks=pytest.mark.slow),
        pytest.param("deepnorm", {"moe": SPARSE}, 4, marks=pytest.mark.slow),
    ],
)
def test_so_it_is_with_operators_in_half_precision(recipe: str, options: dict[str, Any], kinds: int) -> None:
    model = kl.EncoderDecoder(50, 32, 2, 64, 4, 4, recipe, **options).train()
    model.cast_weights(torch.bfloat16)
    form = compiled_form(model)
    with kernels.assumed("cpu"):
        for shape in SHAPES[:3]:
            gradients(form, random_batch(*shape))
    assert graphs() == kinds


@pytest.mark.slow
@pytest.mark.usefixtures("every_operator")
def test_a_hooked_layer_runs_as_it_is_and_the_others_stay_compiled() -> None:
    model, calls, batch = kl.EncoderDecoder(50, 16, 2, 32, 3, 3, "pre_ln").train(), [], random_batch(3, 7, 6)
    form = compiled_form(model)
    gradients(form, batch)
    handle = model.encoder.blocks[1].register_forward_hook(lambda *_: calls.append(1))
    found = gradients(form, batch)
    assert calls == [1]
    handle.remove()
    for name, gradient in gradients(model, batch).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)
    before = graphs()
    gradients(form, batch)
    assert graphs() == before
    # The layer above the hooked one reads a state without its norm, which is a second form of that kind.
    assert before <= 3


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=1)  # as after seven other models
def test_models_of_many_sizes_are_compiled_in_one_process() -> None:
    torch._dynamo.reset()
    for dim in (4, 8):
        model = kl.Decoder(50, dim, 2, 8, 1).train()
        form = fast_form(model)
        compile_layers(form, "eager")
        batch = torch.randint(1, 50, (2, 5))
        torch.testing.assert_close(form(batch).logits, model(batch).logits)


@pytest.mark.slow
def test_a_second_model_of_a_process_is_compiled_with_its_own_recomputation() -> None:
    torch._dynamo.reset()
    kept = {}
    for recompute in ("none", "layer"):
        form = fast_form(kl.Decoder(50, 16, 2, 32, 1).train(), recompute)
        compile_layers(form, "aot_eager_decomp_partition")
        kept[recompute] = _kept_by_compiled_layers(form(torch.randint(1, 50, (2, 5))).logits)
    assert kept["layer"] < kept["none"] / 2


def settings() -> tuple[Any, ...]:
    dynamo = torch._dynamo.config
    limits = (dynamo.specialize_float, dynamo.recompile_limit, dynamo.accumulated_recompile_limit)
    return *limits, shape_config.use_duck_shape, partition_config.activation_memory_budget


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective", "layer"])
def test_the_compilers_settings_are_restored(recompute: Recompute) -> None:
    model, before, inside = kl.Decoder(50, 8, 2, 8, 2).train(), settings(), []
    form = compiled_form(model, recompute, "eager")
    model.decoder.blocks[1].register_forward_hook(lambda *_: inside.append(settings()))
    form(torch.randint(1, 50, (2, 5)))
    assert inside != [before]
    assert inside[0][0] is True
    assert inside[0][3] is False
    assert settings() == before


@pytest.mark.slow
def test_the_compilers_settings_are_restored_after_an_error() -> None:
    model, before = kl.Decoder(50, 8, 2, 8, 2).train(), settings()
    form = compiled_form(model, "layer", "eager")

    def refuse(*_: Any) -> None:
        assert settings() != before
        raise KeyError("refused")

    model.decoder.blocks[1].register_forward_hook(refuse)
    with pytest.raises(KeyError, match="refused"):
        form(torch.randint(1, 50, (2, 5)))
    assert settings() == before


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
