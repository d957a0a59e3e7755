"""The sparse feed-forward network against loops, dense networks, and finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kilolayer as kl
from kilolayer.layers.feedforward import FeedForward
from kilolayer.layers.initialize import new_tensors
from kilolayer.layers.options import LayerOptions
from kilolayer.moe.layer import SparseFeedForward
from kilolayer.recipes.base import Plan
from tests.moe.naive_experts import compare, make_layer

INNER = Plan(inner_norm=True)


def states(batch: int = 3, length: int = 5, dim: int = 6, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, length, dim, dtype=dtype)


def some_real(batch: int = 3, length: int = 5) -> Tensor:
    real = torch.ones(batch, length, dtype=torch.bool)
    real[0, length - 2 :] = real[-1, 0] = False
    return real


@pytest.mark.matrix(4)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "moe",
    [
        {},
        {"top_k": 1},
        {"top_k": 3, "gate": "sigmoid"},
        {"router": "linear", "z_loss": 1e-3},
        {"router": "linear", "top_k": 1, "balance": 0.5},
        {"loss_free": 1e-3, "z_loss": 0.1},
        {"router_dim": 5, "temperature": 0.1},
        {"capacity": 1.0},
        {"capacity": 0.5, "top_k": 1},
        {"capacity": 0.75, "top_k": 3},
    ],
    ids=str,
)
def test_the_layer_is_the_loop(moe: dict[str, Any], padded: bool) -> None:
    layer = make_layer(kl.MoE(**{"experts": 4, **moe}))
    x, real = states(), some_real() if padded else None
    compare(layer.train(), x, real, 1e-9)
    compare(layer.eval(), x, real, 1e-9)


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (Plan(inner_norm=True), {}),
        (Plan(inner_norm=True), {"norm": "rms", "activation": "gelu"}),
        (Plan(bias=False), {"activation": "swiglu"}),
        (Plan(shifts=True, bias=False), {"activation": "gelu"}),
        (Plan(shifts=True, inner_norm=True), {"activation": "swiglu", "norm": "rms"}),
    ],
    ids=str,
)
def test_experts_have_what_the_plan_gives_a_network(plan: Plan, options: dict[str, Any]) -> None:
    layer = make_layer(kl.MoE(experts=4), plan, **options)
    known = {"activation": "relu", "norm": "layer", **options}
    compare(layer, states(), some_real(), 1e-9, **known)


def dense_like(layer: SparseFeedForward, options: LayerOptions, plan: Plan, expert: int = 0) -> FeedForward:
    with new_tensors(dtype=torch.float64):
        dense = FeedForward(options, plan)
    weights = {name.removeprefix("experts."): value for name, value in layer.state_dict().items() if "experts" in name}
    dense.load_state_dict({name: value[expert] for name, value in weights.items()})
    return dense


@torch.no_grad()
@pytest.mark.parametrize("plan", [Plan(), INNER])
@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_one_expert_is_a_dense_network(plan: Plan, activation: str) -> None:
    options = LayerOptions(dim=6, heads=2, ffn_dim=10, activation=activation)  # pyright: ignore[reportArgumentType]
    layer = make_layer(kl.MoE(experts=1, top_k=1), plan, activation=activation)
    x = states()
    torch.testing.assert_close(layer(x)[0], dense_like(layer, options, plan)(x), rtol=1e-13, atol=1e-13)


@torch.no_grad()
@pytest.mark.parametrize("top_k", [2, 3, 4])
def test_equal_experts_are_one(top_k: int) -> None:
    layer = make_layer(kl.MoE(experts=4, top_k=top_k), INNER)
    for parameter in layer.experts.parameters():
        parameter.copy_(parameter[:1].expand_as(parameter))
    x = states()
    dense = dense_like(layer, LayerOptions(dim=6, heads=2, ffn_dim=10), INNER)
    torch.testing.assert_close(layer(x)[0], dense(x), rtol=1e-12, atol=1e-12)


@pytest.mark.matrix(4)
@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 3, 7, 64])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (4, 1), (4, 4), (16, 2), (5, 2)])
@pytest.mark.parametrize("all_to_one", [False, True])
def test_odd_loads_in_fp32_are_a_dense_computation(tokens: int, experts: int, top_k: int, all_to_one: bool) -> None:
    layer = make_layer(kl.MoE(experts=experts, top_k=top_k, router="linear"), INNER, torch.float32, dim=8, ffn_dim=12)
    if all_to_one:
        layer.router.weight.zero_()
        layer.router.weight[-1, 0], layer.router.weight[0, 0] = 9.0, 8.0
    x = states(1, tokens, 8, torch.float32).abs()
    y, routing = layer(x)
    assert int(routing.load.sum()) == tokens * top_k
    if all_to_one:
        assert int(routing.load[-1]) == tokens
    gates = (x[0].double() @ layer.router.weight.double().T).softmax(dim=-1)
    chosen = torch.zeros_like(gates).scatter(1, gates.topk(top_k).indices, 1.0)
    weights = gates * chosen
    if top_k > 1:
        weights = weights / weights.sum(dim=1, keepdim=True)
    options = LayerOptions(dim=8, heads=2, ffn_dim=12)
    everything = torch.stack([dense_like(layer, options, INNER, expert)(x[0].double()) for expert in range(experts)])
    expected = (weights.T[..., None] * everything).sum(dim=0)
    assert y.isfinite().all()
    torch.testing.assert_close(y[0].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("moe", "plan"),
    [
        ({}, Plan()),
        ({"top_k": 1, "gate": "sigmoid", "z_loss": 1e-2}, INNER),
        ({"router": "linear", "capacity": 0.75}, Plan(shifts=True)),
    ],
    ids=str,
)
def test_gradients_by_finite_differences(moe: dict[str, Any], plan: Plan, padded: bool) -> None:
    layer = make_layer(kl.MoE(**{"experts": 3, **moe}), plan, dim=4, ffn_dim=3, activation="gelu").train()
    names, values = zip(*layer.named_parameters(), strict=True)
    x, real = states(2, 3, 4).requires_grad_(), some_real(2, 3) if padded else None

    def run(x: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        y, routing = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x, real))
        return y, routing.router_loss

    assert torch.autograd.gradcheck(run, (x, *(value.detach().requires_grad_() for value in values)), eps=1e-7, atol=1e-5)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("garbage", [0.0, 1e30, float("nan"), float("inf")])
@pytest.mark.parametrize("moe", [{}, {"capacity": 1.0}, {"gate": "sigmoid", "loss_free": 1e-3}], ids=str)
def test_padding_is_never_routed(garbage: float, moe: dict[str, Any]) -> None:
    layer = make_layer(kl.MoE(experts=4, **moe), INNER).train()
    x, real = states(), some_real()
    short = x[real][None].clone().requires_grad_()
    alone, without = layer(short)
    filled = torch.where(real[..., None], x, garbage).requires_grad_()
    y, routing = layer(filled, real)
    torch.testing.assert_close(y[real][None], alone, rtol=1e-12, atol=1e-12)
    assert not y[~real].any()
    for found, expected in zip(routing, without, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = []
    for inputs, output, told in ((filled, y, routing), (short, alone, without)):
        layer.zero_grad()
        (output.square().sum() + told.router_loss).backward()
        gradients.append({name: value.grad for name, value in layer.named_parameters()} | {"x": inputs.grad})
    for name, expected in gradients[1].items():
        found = gradients[0][name]
        assert found is not None
        if name == "x":
            assert not found[~real].any()
            found = found[real][None]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_a_batch_of_padding_alone_is_nothing() -> None:
    layer = make_layer(kl.MoE(experts=4, capacity=1.0)).train()
    y, routing = layer(states(), torch.zeros(3, 5, dtype=torch.bool))
    (y.sum() + routing.router_loss).backward()
    assert not y.any()
    assert not any(bool(each.any()) for each in (routing.load, routing.first, routing.entropy, routing.dropped))
    assert all(not parameter.grad.any() for parameter in layer.parameters() if parameter.grad is not None)


def test_full_experts_let_tokens_pass_by_hand() -> None:
    """Three experts, top-2, ceil(4 / 3) = 2 tokens each, factor 0.75: 3 choices an expert."""
    layer = make_layer(kl.MoE(experts=3, router="linear", capacity=0.75), dim=3, heads=1, positions="none").train()
    preferences = torch.tensor([[3.0, 2, 1], [3, 1, 2], [1, 3, 2], [3, 2, 1]], dtype=torch.float64)
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(3))
        for parameter in layer.experts.parameters():
            parameter.zero_()
        assert layer.experts.output.bias is not None
        layer.experts.output.bias.copy_(torch.eye(3))
    y, routing = layer(preferences[None])
    assert routing.load.tolist() == [3, 3, 2]
    assert float(routing.dropped) == 0
    near, far = 1 / (1 + 2.718281828459045**-1), 1 / (1 + 2.718281828459045)
    everyone = [[near, far, 0], [near, 0, far], [0, near, far], [near, far, 0]]
    torch.testing.assert_close(y[0], torch.tensor(everyone, dtype=torch.float64))
    layer.moe = kl.MoE(experts=3, router="linear", capacity=0.5)  # 2 choices an expert
    y, routing = layer(preferences[None])
    # Expert 0 takes the first choices of tokens 0 and 1. Expert 1 takes token 2's first choice, then token 0's second one.
    expected = [[near, far, 0], [near, 0, far], [0, near, far], [0, 0, 0]]
    torch.testing.assert_close(y[0], torch.tensor(expected, dtype=torch.float64))
    assert routing.load.tolist() == [3, 3, 2]
    assert float(routing.dropped) == pytest.approx(2 / 8)
    assert float(layer.eval()(preferences[None])[1].dropped) == 0


@torch.no_grad()
@pytest.mark.parametrize("second", ["all", "random", "sampling"])
def test_evaluation_is_deterministic_and_changes_nothing(second: str) -> None:
    layer = make_layer(kl.MoE(experts=4, second=second)).eval()  # pyright: ignore[reportArgumentType]
    before, x = {name: value.clone() for name, value in layer.state_dict().items()}, states()
    first, again = layer(x), layer(x)
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_noise_is_torchs_own() -> None:
    for second in ("random", "sampling"):
        layer, x = make_layer(kl.MoE(experts=4, second=second)).train(), states(4, 20)
        torch.manual_seed(3)
        first = layer(x)[0]
        assert not torch.equal(first, layer(x)[0])
        torch.manual_seed(3)
        assert torch.equal(first, layer(x)[0])


@pytest.mark.parametrize("second", ["random", "sampling"])
def test_noisy_training_is_finite_and_counts_what_it_sends(second: str) -> None:
    layer, x, real = make_layer(kl.MoE(experts=4, second=second, capacity=1.0)).train(), states(), some_real()
    y, routing = layer(x, real)
    (y.square().sum() + routing.router_loss).backward()
    count = int(real.sum())
    assert count <= int(routing.load.sum()) <= 2 * count
    assert all(bool(parameter.grad.isfinite().all()) for parameter in layer.parameters() if parameter.grad is not None)
    assert float(routing.first.sum()) == pytest.approx(1.0)


@torch.no_grad()
def test_half_precision_routes_as_fp32_does() -> None:
    layer = make_layer(kl.MoE(experts=8), INNER, torch.float32, dim=16, ffn_dim=24)
    x = states(2, 9, 16, torch.bfloat16)
    precise, told = layer(x.float())
    rough, of_rough = layer.to(torch.bfloat16)(x)
    assert rough.dtype == torch.bfloat16
    assert torch.equal(told.load, of_rough.load)
    torch.testing.assert_close(rough.float(), precise, rtol=0.05, atol=0.05)
