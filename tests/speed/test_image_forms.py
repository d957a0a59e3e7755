"""Compiled layers of image encoders: one compilation serves the layers, all grids, and visible patches alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.runtime.runtime import runtime_of
from kilolayer.speed.fast import compile_layers, fast_form
from kilolayer.speed.fast_stack import FastStack
from kilolayer.speed.runtime import FAST

pytestmark = pytest.mark.filterwarnings("default")  # the compiler warns about itself
SIZES: dict[str, Any] = {"dim": 16, "heads": 2, "ffn_dim": 32, "layers": 4}
DECODER: dict[str, Any] = {"vocab_size": 48, "image": {"size": 12, "patch": 4, "decoder": {"layers": 2, "dim": 8, "heads": 2}}}


def gradients(model: Any, images: torch.Tensor, visible: torch.Tensor | None) -> dict[str, torch.Tensor]:
    model.zero_grad()
    out = model(images) if visible is None else model(images, visible=visible)
    loss = out.states.sin().sum() if out.logits is None else out.logits.sin().sum()
    (loss + out.router_loss).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "graphs"),
    [
        ({"recipe": "sub_ln", "positions": "learned"}, 1),
        # The second is for visible patches, which lie elsewhere in each image.
        pytest.param({"recipe": "pre_ln", "positions": "rotary"}, 2, marks=pytest.mark.slow),
        pytest.param(
            {"recipe": "deepnorm", "map_head": {"classes": 3, "channels": 8, "dropout": 0.0}}, 1, marks=pytest.mark.slow
        ),
        pytest.param(
            {"recipe": "sub_ln", "moe": {"experts": 2, "every": 2}, "head": {"dropout": 0.0}}, 2, marks=pytest.mark.slow
        ),
        pytest.param({"recipe": "pre_ln", **DECODER}, 2, marks=pytest.mark.slow),
    ],
)
def test_a_layer_is_compiled_once_for_all_grids(options: dict[str, Any], graphs: int) -> None:
    torch.manual_seed(0)
    model = kl.build_model({**SIZES, "image": {"size": 12, "patch": 4}, **options}).train()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    form = fast_form(model)
    assert all(type(module) is FastStack for module in form.modules() if isinstance(module, type(model.encoder)))
    compile_layers(form, "aot_eager")
    hidden = "map_head" not in options
    for rows, size, count in ((2, (12, 12), None), (3, (20, 12), None), (5, (12, 12), 4)):
        visible = None if count is None or not hidden else torch.rand(rows, 9).argsort(dim=1)[:, :count]
        images = torch.randn(rows, 3, *size)
        found = gradients(form, images, visible)
        for name, gradient in gradients(model, images, visible).items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_a_run_trains_the_fast_form() -> None:
    model = kl.build_model({**SIZES, "image": {"size": 12, "patch": 4}, "head": {"pooler": "none"}})
    lines: list[str] = []
    form, _ = FAST.training_form(model, torch.device("cpu"), lines.append, eager=False, recompute="none")
    assert runtime_of(form) is FAST
    assert type(form.encoder) is FastStack
    assert {id(weight) for weight in form.parameters()} == {id(weight) for weight in model.parameters()}
