"""A stack: the loop over its blocks, the final norm, the streams of recipes, and drop path by depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kilolayer as kl
from kilolayer.layers.context import AttentionContext, Sequences
from kilolayer.layers.mask import Mask
from kilolayer.layers.sublayer import DropPath
from tests.fixtures.formulas import normed

LAYERS = 3


def stack_of(recipe: str, **options: Any) -> Any:
    model = kl.Encoder(11, 8, 2, 12, LAYERS, recipe, dtype=torch.float64, positions="none", **options).eval()
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            weight += 0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number), dtype=weight.dtype)
    return model.encoder


def states() -> Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@torch.no_grad()
@pytest.mark.parametrize(("recipe", "has_top"), [("deepnorm", False), ("pre_ln", True), ("sub_ln", True)])
def test_each_block_reads_the_output_of_the_one_before(recipe: str, has_top: bool) -> None:
    stack, x = stack_of(recipe), states()
    kept = [x]
    for block in stack.blocks:
        kept.append(block(kept[-1], AttentionContext(Mask())).states)
    out = stack(Sequences(x), hidden_states=True)
    assert all(torch.equal(found, expected) for found, expected in zip(out.hidden_states, kept, strict=True))
    torch.testing.assert_close(out.states, normed(kept[-1], stack.top_norm) if has_top else kept[-1])


@torch.no_grad()
def test_the_final_norm_can_be_left_out() -> None:
    x, with_norm, without = states(), stack_of("pre_ln"), stack_of("pre_ln", final_norm=False)
    without.load_state_dict(with_norm.state_dict(), strict=False)
    torch.testing.assert_close(with_norm(Sequences(x)).states, normed(without(Sequences(x)).states, with_norm.top_norm))


@torch.no_grad()
def test_a_stream_decides_what_each_block_reads() -> None:
    stack, x, read = stack_of("dlcl"), states(), []
    for block in stack.blocks:
        block.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    written: list[Tensor] = []
    for block in stack.blocks:
        block.register_forward_hook(lambda _, inputs, output: written.append(output.states))
    states_of_top = stack(Sequences(x)).states
    history = stack.stream.begin(x)
    for index in range(LAYERS):
        torch.testing.assert_close(read[index], stack.stream.read(history, index))
        history = stack.stream.write(history, written[index])
    torch.testing.assert_close(states_of_top, stack.top(stack.stream.end(history)))
    assert not torch.equal(read[1], written[0])


def test_a_plain_stream_hands_on_the_latest_state() -> None:
    stream, x, y = stack_of("deepnorm").stream, states(), states() + 1
    history = stream.write(stream.begin(x), y)
    assert stream.read(stream.begin(x), 0) is x
    assert stream.read(history, 1) is y
    assert stream.end(history) is y


def test_drop_path_rises_with_depth_and_keeps_the_mean() -> None:
    model = kl.Encoder(11, 16, 2, 32, 4, drop_path=0.4)
    dropped = [float(block.feedforward.drop_path.p) for block in model.encoder.layers()]  # pyright: ignore[reportArgumentType]
    assert dropped == pytest.approx([0.1, 0.2, 0.3, 0.4])
    kept = DropPath(0.4)(torch.ones(20_000, 1, 1))
    assert sorted(kept.unique().tolist()) == pytest.approx([0, 1 / 0.6])
    assert float(kept.mean()) == pytest.approx(1, abs=0.02)
