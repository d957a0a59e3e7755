"""An adapted model is our own model under the same recipe: forward, gradients and fifty steps of Adam, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kilolayer as kl
from kilolayer.models.adapt.stacks import ForeignModel, find
from kilolayer.recipes.base import Recipe
from tests.models.adapt.adaptable_models import BUILDERS, SOURCE_REAL, STATES, run
from tests.models.adapt.twins import our_model, run_ours, twins

POST = ["nn.TransformerEncoder", "nn.TransformerDecoder", "nn.Transformer", "BERT", "RoBERTa", "BART", "Marian"]
PRE = [f"nn.Transformer{part}, norm_first" for part in ("Encoder", "Decoder", "")] + ["GPT-2", "ViT"]
POST_RECIPES: list[str | Recipe] = [
    "deepnorm",
    "keel",
    "ds_init",
    kl.recipes.get("admin", start="closed"),
    kl.recipes.get("admin", start="closed", weight="trainable"),
]
PRE_RECIPES: list[str | Recipe] = [
    "sub_ln",
    "normformer",
    "layer_scale",
    "lns",
    "peri_ln",
    kl.recipes.get("complete_p", base_width=16, base_depth=1),
]
STEPS = 50


def name_of(recipe: str | Recipe) -> str:
    return recipe if isinstance(recipe, str) else "-".join(str(value) for value in recipe.table().values())


CASES = [(title, recipe) for recipe in POST_RECIPES for title in POST]
CASES += [(title, recipe) for recipe in PRE_RECIPES for title in PRE]


class Inputs:
    """Keeps what enters the first layer of each stack, before any hook of the recipe."""

    def __init__(self, found: ForeignModel) -> None:
        self.seen: dict[str, Tensor] = {}
        for stack in found.stacks:
            stack.layers[0].register_forward_pre_hook(self.keep(stack.side), with_kwargs=True)

    def keep(self, side: str) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.seen[side] = (args[0] if args else next(iter(kwargs.values()))).detach()

        return hook


def final_norms(model: Any) -> dict[str, nn.Module | None]:
    """The norms on top of the stacks."""
    match type(model).__name__:
        case "TransformerEncoder":
            return {"encoder": model.norm}
        case "TransformerDecoder":
            return {"decoder": model.norm}
        case "Transformer":
            return {"encoder": model.encoder.norm, "decoder": model.decoder.norm}
        case "GPT2Model":
            return {"decoder": model.ln_f}
        case "ViTModel":
            return {"encoder": model.layernorm}
        case _:
            return {}


def spread(parameters: Any) -> None:
    """Norms, biases and scales away from 0 and 1, as training leaves them."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.dim() == 1 or parameter.shape[1:] == (1, 1):
                parameter.add_(0.2 * torch.randn_like(parameter))


@pytest.mark.slow
@pytest.mark.parametrize(("title", "recipe"), CASES, ids=[f"{title}-{name_of(recipe)}" for title, recipe in CASES])
def test_forward_gradients_and_fifty_steps_are_ours(title: str, recipe: str | Recipe) -> None:
    model = BUILDERS[title]()
    found = find(model)
    inputs = Inputs(found)
    kl.adapt(model, recipe, seed=3)
    layers = [layer for stack in found.stacks for layer in stack.layers]
    norms = {side: norm for side, norm in final_norms(model).items() if norm is not None}
    trained = [parameter for module in (*layers, *norms.values()) for parameter in module.parameters()]
    spread(trained)
    for parameter in model.parameters():
        parameter.requires_grad_(any(parameter is each for each in trained))
    eps = 1e-12 if title in ("BERT", "RoBERTa", "ViT") else 1e-5
    ours = our_model(found, recipe, eps, "gelu" if title in ("BERT", "RoBERTa", "ViT", "GPT-2") else "relu")
    pairs = [*twins(found, ours, norms)]
    with torch.no_grad():
        for theirs, own in pairs:
            own("data").copy_(theirs("data"))  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType]
    run(model)
    memory = STATES if title.startswith("nn.TransformerDecoder") else None
    real = {"encoder": None if title == "ViT" else SOURCE_REAL, "decoder": None}
    goal: Tensor | None = None
    optimizers = [torch.optim.Adam([p for p in each.parameters() if p.requires_grad], lr=3e-3) for each in (model, ours)]
    losses = []
    for step in range(STEPS):
        states, counted = run(model)
        own_states = run_ours(ours, found, inputs.seen, memory, real)
        goal = torch.randn_like(states).detach() if goal is None else goal
        assert (states - own_states)[counted].abs().max() < (1e-12 if step == 0 else 1e-9)
        for output, optimizer in zip((states, own_states), optimizers, strict=True):
            optimizer.zero_grad()
            (output - goal)[counted].square().mean().backward()
        losses.append((states - goal)[counted].square().mean().item())
        if step == 0:
            for theirs, own in pairs:
                torch.testing.assert_close(theirs("grad"), own("grad"), rtol=0, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    for theirs, own in pairs:
        torch.testing.assert_close(theirs("data"), own("data"), rtol=0, atol=1e-9)
