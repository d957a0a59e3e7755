"""The residual equation of one sublayer, against the same equation written out in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kilolayer.layers.initialize import initialize
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.routing import Routing
from kilolayer.layers.stream import LayerOutput, Pair
from kilolayer.layers.sublayer import ExtendedSublayer, Sublayer
from kilolayer.recipes.base import Learned, Plan
from tests.fixtures.formulas import normed

OPTIONS = LayerOptions(dim=6, heads=2, ffn_dim=8)
PLANS = {
    "post": Plan(out_norm=True, skip=1.7),
    "pre": Plan(pre_norm=True, in_scale=0.3),
    "all": Plan(pre_norm=True, post_norm=True, out_norm=True, skip=Learned(0.8, "vector"), branch=0.4, in_scale=1.2),
}


class Double(nn.Module):
    """f(x, y) = 2 x + y."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return 2 * x + y


class Routed(nn.Module):
    """The same with a routing whose loss is the sum of x."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Routing]:
        return 2 * x + y, Routing(x.sum(), *[torch.zeros(())] * 6)


def make(kind: type[Sublayer], f: nn.Module, plan: Plan) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        sublayer = kind(f, OPTIONS, plan)
    finally:
        torch.set_default_dtype(torch.float32)
    initialize(sublayer, 0)
    with torch.no_grad():
        for weight in sublayer.parameters():
            weight += torch.rand(weight.shape, dtype=weight.dtype)
    return sublayer


def branch_of(sublayer: Any, plan: Plan, x: Tensor, y: Tensor) -> Tensor:
    return plan.branch * normed(2 * plan.in_scale * normed(x, sublayer.pre_norm) + y, sublayer.post_norm)


def skip_of(sublayer: Any, plan: Plan) -> Any:
    return sublayer.skip.weight if isinstance(plan.skip, Learned) else plan.skip


@pytest.fixture
def states() -> tuple[Tensor, Tensor, Tensor]:
    x, y, z = torch.randn(3, 2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind()
    return x, y, z


@pytest.mark.parametrize("name", PLANS)
def test_a_sublayer_is_its_equation(name: str, states: tuple[Tensor, Tensor, Tensor]) -> None:
    plan, (x, y, _) = PLANS[name], states
    sublayer = make(Sublayer, Double(), plan)
    expected = normed(skip_of(sublayer, plan) * x + branch_of(sublayer, plan, x, y), sublayer.out_norm)
    torch.testing.assert_close(sublayer(x, y), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("inward", "outward"), [(1.0, 0.0), (0.0, 0.7), (0.5, 2.0)])
@pytest.mark.parametrize("routed", [False, True], ids=["dense", "routed"])
def test_a_second_state_is_read_and_written(
    inward: float, outward: float, routed: bool, states: tuple[Tensor, Tensor, Tensor]
) -> None:
    plan, (x, y, z) = Plan(out_norm=True, skip=1.3, second_in=inward, second_out=outward), states
    sublayer = make(ExtendedSublayer, Routed() if routed else Double(), plan)
    out = sublayer(Pair(x, z), y)
    branch = branch_of(sublayer, plan, x, y)
    if routed:
        assert isinstance(out, LayerOutput)
        assert out.routing is not None
        torch.testing.assert_close(out.routing.router_loss, x.sum())
    pair = out.states if routed else out
    assert isinstance(pair, Pair)
    torch.testing.assert_close(pair.x, normed(1.3 * x + branch + inward * z, sublayer.out_norm), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(pair.second, z + outward * branch, rtol=1e-10, atol=1e-10)


def test_experts_hand_on_their_routing_beside_a_single_state(states: tuple[Tensor, Tensor, Tensor]) -> None:
    plan, (x, y, _) = PLANS["all"], states
    sublayer = make(ExtendedSublayer, Routed(), plan)
    out = sublayer(x, y)
    expected = normed(skip_of(sublayer, plan) * x + branch_of(sublayer, plan, x, y), sublayer.out_norm)
    assert isinstance(out, LayerOutput)
    torch.testing.assert_close(out.states, expected, rtol=1e-10, atol=1e-10)
