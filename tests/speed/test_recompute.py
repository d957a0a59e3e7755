"""Recomputation changes what is kept, and nothing else."""

from __future__ import annotations

import gc
import shutil
from contextlib import suppress
from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.speed.compiler import Recompute
from kilolayer.speed.fast import compile_layers, fast_form

pytestmark = pytest.mark.filterwarnings("default")  # the compiler warns about itself


def alive() -> dict[int, int]:
    """Bytes of all tensors that Python holds, by their place."""
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter):
            with suppress(RuntimeError):  # what other tests compiled left tensors without memory
                found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return found


def step(what: Recompute, backend: str | None, **options: Any) -> tuple[int, float, dict[str, torch.Tensor]]:
    """Bytes kept by the layers, the loss and the gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = kl.Encoder(50, 64, 4, 256, 6, "deepnorm", **options).train()
    source = torch.randint(1, 50, (8, 12))
    source[1, 7:] = 0
    form = fast_form(model, what)
    if backend is not None:
        compile_layers(form, backend)
    before = alive()
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        states = form(source).states
    # Autograd's own are seen by the hook alone, those that a policy keeps are Python's.
    kept = {place: size for place, size in (kept | alive()).items() if place not in before}
    loss = states.square().sum()
    loss.backward()
    return (
        sum(kept.values()),
        float(loss.detach()),
        {name: w.grad for name, w in model.named_parameters() if w.grad is not None},
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager_decomp_partition", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_less_is_kept_and_the_gradients_are_the_same(backend: str | None, dropout: float) -> None:
    if backend is not None and dropout:
        pytest.skip(
            "what is drawn is kept by the default backend alone: test_a_compiled_layer_drops_the_same_when_it_is_recomputed"
        )
    bytes_kept, losses, gradients = zip(
        *(step(what, backend, dropout=dropout) for what in ("none", "selective", "layer")), strict=True
    )
    assert bytes_kept[0] > 1.3 * bytes_kept[1] > 1.5 * bytes_kept[2]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)
    for found in gradients[1:]:
        for name, expected in gradients[0].items():
            torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs one for C++")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.slow
@pytest.mark.parametrize("what", ["selective", "layer"])
def test_a_compiled_layer_drops_the_same_when_it_is_recomputed(what: Recompute, device: str) -> None:
    torch._dynamo.reset()
    dropouts = {"dropout": 0.3, "attention_dropout": 0.3, "drop_path": 0.3}
    model = kl.Decoder(50, 16, 2, 32, 2, activation="gelu", device=device, dtype=torch.float64, **dropouts).train()
    form = fast_form(model, what)
    compile_layers(form)
    source = torch.randint(1, 50, (3, 7), device=device)
    weights = list(model.parameters())
    directions = [torch.randn_like(weight) for weight in weights]

    def loss(distance: float) -> torch.Tensor:
        with torch.no_grad():
            for weight, direction in zip(weights, directions, strict=True):
                weight.data = weight + distance * direction
        torch.manual_seed(1)
        return form(source).logits.logsumexp(-1).sum()

    loss(0.0).backward()
    slope = sum(
        float((weight.grad * way).sum()) for weight, way in zip(weights, directions, strict=True) if weight.grad is not None
    )
    ahead, behind = float(loss(1e-6).detach()), float(loss(-2e-6).detach())
    assert (ahead - behind) / 2e-6 == pytest.approx(slope, rel=1e-5)
