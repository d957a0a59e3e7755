"""A block: its sublayers in order, what each of them reads, and the branch scale that they may share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kilolayer import recipes
from kilolayer.layers.block import Block, CrossBlock, make_block
from kilolayer.layers.context import AttentionContext
from kilolayer.layers.initialize import initialize
from kilolayer.layers.mask import Mask
from kilolayer.layers.options import LayerOptions
from kilolayer.recipes.base import Depths

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
