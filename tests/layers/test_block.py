"""A block: its sublayers in order, what each of them reads, and the branch scale that they may share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import kilolayer as kl
from kilolayer import recipes
from kilolayer.errors import OptionError
from kilolayer.layers.block import Block, CrossBlock, make_block
from kilolayer.layers.context import AttentionContext
from kilolayer.layers.initialize import initialize
from kilolayer.layers.mask import Mask
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.scale import Constant
from kilolayer.recipes.base import Depths, Kind, Learned, Place, Plan

OPTIONS = LayerOptions(dim=8, heads=2, ffn_dim=12)
PAIRED = Depths(encoder=2, decoder=2)
SUBLAYERS = {
    Block: ("self_attention", "feedforward"),
    CrossBlock: ("self_attention", "cross_attention", "feedforward"),
}


def make(recipe: str, kind: type[Block]) -> Any:
    block = make_block(OPTIONS, recipes.get(recipe), "decoder" if kind is CrossBlock else "encoder", 1, PAIRED).double()
    initialize(block, 0)
    assert type(block) is kind
    return block.eval()


def states(length: int, seed: int) -> Tensor:
    return torch.randn(2, length, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.no_grad()
@pytest.mark.parametrize("kind", SUBLAYERS)
@pytest.mark.parametrize("recipe", ["deepnorm", "pre_ln"])
def test_a_block_is_its_sublayers_in_order(kind: type[Block], recipe: str) -> None:
    block, x, memory = make(recipe, kind), states(5, 1), states(4, 2)
    context = AttentionContext(Mask(causal=True), memory=memory, memory_mask=Mask())
    y = block.self_attention(x, context.mask)
    if kind is CrossBlock:
        y = block.cross_attention(y, memory, Mask())
    y = block.feedforward(y)
    found, routing = block(x, context)
    assert torch.equal(found, y)
    assert routing is None


@pytest.mark.parametrize("kind", SUBLAYERS)
def test_the_sublayers_are_listed_as_they_are_called(kind: type[Block]) -> None:
    block, calls = make("deepnorm", kind), []
    for name, sublayer in block.named_children():
        sublayer.register_forward_hook(lambda *_, name=name: calls.append(name))
    block(states(5, 1), AttentionContext(Mask(), memory=states(4, 2), memory_mask=Mask()))
    assert tuple(calls) == tuple(block.kinds()) == SUBLAYERS[kind]
    assert [getattr(block, name) for name in calls] == block.sublayers()


@torch.no_grad()
@pytest.mark.parametrize("kind", SUBLAYERS)
def test_the_branch_scale_of_a_layer_is_one_parameter(kind: type[Block]) -> None:
    block, x = make("rezero", kind), states(5, 1)
    context = AttentionContext(Mask(), memory=states(4, 2), memory_mask=Mask())
    shared = [name for name, _ in block.named_parameters() if "branch" in name]
    assert shared == ["layer_branch.weight"]
    assert all(sublayer.branch is block.layer_branch for sublayer in block.sublayers())
    assert torch.equal(block(x, context).states, x)  # it begins at 0
    block.layer_branch.weight.fill_(0.3)
    y = x
    for sublayer, inputs in zip(block.sublayers(), [(Mask(),), (context.memory, Mask()), ()], strict=False):
        y = y + 0.3 * sublayer.f(y, *(inputs if sublayer is not block.feedforward else ()))
    torch.testing.assert_close(block(x, context).states, y)


def test_a_recipe_without_a_shared_scale_has_none() -> None:
    assert make("deepnorm", Block).layer_branch is None


@dataclass(frozen=True)
class Shares(kl.recipes.Recipe):
    """The feed-forward network shares its branch scale with self-attention, and cross-attention has its own."""

    second: float = 0.5

    def plan(self, place: Place) -> Plan:
        if place.kind is Kind.CROSS_ATTENTION:
            return Plan(pre_norm=True, branch=0.1)
        start = self.second if place.kind is Kind.FEEDFORWARD else 0.5
        return Plan(pre_norm=True, branch=Learned(start, "scalar", per="layer"))


def test_only_sublayers_that_ask_for_the_shared_scale_have_it() -> None:
    block = make_block(OPTIONS, Shares(), "decoder", 1, PAIRED)
    scales = [sublayer.branch for sublayer in block.sublayers()]
    assert scales[0] is scales[2] is block.layer_branch
    assert isinstance(scales[1], Constant)
    assert scales[1].value == 0.1


def test_a_scale_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(OptionError, match="share two different branch scales"):
        make_block(OPTIONS, Shares(second=0.7), "encoder", 1, Depths(encoder=2))
    for name in ("skip", "in_scale"):
        with pytest.raises(OptionError, match=f"{name} would be one number per sublayer, not per layer"):
            Plan(**{name: Learned(1.0, "scalar", per="layer")})  # pyright: ignore[reportArgumentType]
