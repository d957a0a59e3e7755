"""Who serves a token, and with what weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kilolayer as kl
from kilolayer.layers.initialize import new_tensors
from kilolayer.moe.router import Choice, CosineRouter, Router, make_router
from kilolayer.recipes.base import Plan
from tests.moe.naive_experts import cosine, softmax


def router(dim: int = 8, **options: Any) -> Router:
    with new_tensors(dtype=torch.float64):
        made = make_router(kl.MoE(**{"experts": 6, **options}), dim, Plan())
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.7)
        if isinstance(made, CosineRouter):
            made.log_temperature.fill_(-1.0)
        if made.selection_bias is not None:
            made.selection_bias.normal_(0, 0.3)
    return made


def tokens(count: int = 40, dim: int = 8) -> Tensor:
    return torch.randn(count, dim, dtype=torch.float64)


def scores(made: Router, token: Tensor) -> list[float]:
    if isinstance(made, CosineRouter):
        return [cosine(made.weight @ token, each) for each in made.embeddings]
    return (made.weight @ token).tolist()


@pytest.mark.matrix(4)
@torch.no_grad()
@pytest.mark.parametrize("kind", [{}, {"gate": "sigmoid"}, {"router": "linear"}], ids=str)
@pytest.mark.parametrize("top_k", [1, 2, 3, 6])
@pytest.mark.parametrize("loss_free", [0.0, 1e-3])
def test_choices_and_weights_are_those_of_a_loop(kind: dict[str, Any], top_k: int, loss_free: float) -> None:
    made, x = router(top_k=top_k, loss_free=loss_free, **kind), tokens()
    choice = made(x, None)
    temperature = 2.718281828459045**-1.0 if isinstance(made, CosineRouter) else 1.0
    bias = [0.0] * 6 if made.selection_bias is None else made.selection_bias.tolist()
    for index, token in enumerate(x):
        logits = [score / temperature for score in scores(made, token)]
        gates = softmax(logits)
        if kind.get("gate") == "sigmoid":
            gates = [1 / (1 + 2.718281828459045**-logit) for logit in logits]
        best = sorted(range(6), key=lambda e: -(gates[e] + bias[e]))[:top_k]
        assert choice.experts[index].tolist() == best
        whole = sum(gates[e] for e in best) if top_k > 1 else 1.0
        assert choice.weights[index].tolist() == pytest.approx([gates[e] / whole for e in best])
        assert choice.logits[index].tolist() == pytest.approx(logits)


@torch.no_grad()
@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_xmoe_looks_at_directions_alone(gate: str) -> None:
    made, x = router(gate=gate), tokens()
    small, large = made(x, None), made(10 * x, None)
    torch.testing.assert_close(small.logits, large.logits, rtol=1e-12, atol=1e-12)
    assert torch.equal(small.experts, large.experts)
    linear = router(router="linear")
    torch.testing.assert_close(linear(10 * x, None).logits, 10 * linear(x, None).logits)


@torch.no_grad()
def test_the_balance_loss_sees_the_starting_temperature() -> None:
    made, x = router(temperature=0.5), tokens()
    before = made(x, None)
    assert isinstance(made, CosineRouter)
    made.log_temperature += 1.0
    after = made(x, None)
    assert torch.equal(before.shares, after.shares)
    assert not torch.allclose(before.gates, after.gates)
    torch.testing.assert_close(before.shares[0], torch.tensor(softmax([s / 0.5 for s in scores(made, x[0])])).double())


@pytest.mark.parametrize(
    ("options", "start"), [({}, 0.3), ({"gate": "sigmoid"}, 0.07), ({"temperature": 1.5}, 1.5), ({"router": "linear"}, 1.0)]
)
def test_the_temperature_starts_as_the_paper_says(options: dict[str, Any], start: float) -> None:
    model = kl.Encoder(20, 16, 2, 32, 2, moe=kl.MoE(experts=4, **options))
    out = model(torch.ones(1, 3).long())
    assert out.routing is not None
    assert float(out.routing[0].temperature) == pytest.approx(start)


@pytest.mark.parametrize("experts", [2, 3, 4])
def test_the_directions_of_few_experts_are_learned_too(experts: int) -> None:
    made = router(experts=experts, top_k=1)
    made(tokens(), None).weights.sum().backward()
    for name in ("weight", "embeddings"):
        gradient = made.get_parameter(name).grad
        assert gradient is not None
        assert gradient.norm() > 1e-3, name


@torch.no_grad()
def test_a_temperature_never_falls_to_nothing() -> None:
    made = router()
    assert isinstance(made, CosineRouter)
    made.log_temperature.fill_(-100.0)
    assert float(made.temperature) == pytest.approx(0.01)
    assert made(tokens(), None).weights.isfinite().all()


@torch.no_grad()
def test_a_token_without_direction_is_served() -> None:
    made = router()
    x = tokens(3)
    x[1] = 0
    x.requires_grad_()
    with torch.enable_grad():
        choice: Choice = made(x, None)
        choice.weights.square().sum().backward()
    assert choice.weights.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@torch.no_grad()
def test_padding_is_sent_nowhere() -> None:
    made, x = router(), tokens(4)
    real = torch.tensor([True, False, True, False])
    choice = made(x, real)
    assert choice.experts[~real].eq(6).all()
    assert not choice.weights[~real].any()
    assert torch.equal(choice.experts[real], made(x[real], None).experts)


@pytest.mark.slow
@torch.no_grad()
def test_random_second_experts_are_kept_by_their_weight() -> None:
    made, x = router(second="random").train(), tokens(5)
    every = router(second="all")
    every.load_state_dict(made.state_dict())
    expected = every(x, None)
    kept = torch.zeros(5, dtype=torch.float64)
    for _ in range(2000):
        choice = made(x, None)
        drawn = choice.experts[:, 1] != 6
        assert torch.equal(choice.experts[:, 0], expected.experts[:, 0])
        assert torch.equal(choice.experts[drawn, 1], expected.experts[drawn, 1])
        # Weights are normalized before a choice is dropped.
        assert torch.equal(choice.weights[:, 0], expected.weights[:, 0])
        assert torch.equal(choice.weights[:, 1], torch.where(drawn, expected.weights[:, 1], 0))
        kept += drawn / 2000
    torch.testing.assert_close(kept, 2 * expected.weights[:, 1], rtol=0, atol=0.05)


@torch.no_grad()
def test_sampled_second_experts_follow_their_probabilities() -> None:
    made, x = router(second="sampling").train(), tokens(1).expand(4000, -1)
    choice = made(x, None)
    first = int(choice.experts[0, 0])
    assert choice.experts[:, 0].eq(first).all()
    assert first == int(choice.logits[0].argmax())
    others = choice.gates[0].clone()
    others[first] = 0
    found = torch.bincount(choice.experts[:, 1], minlength=6) / 4000
    torch.testing.assert_close(found.double(), others / others.sum(), rtol=0, atol=0.04)
    pairs = choice.gates.gather(1, choice.experts)
    torch.testing.assert_close(choice.weights, pairs / pairs.sum(dim=1, keepdim=True))


@torch.no_grad()
@pytest.mark.parametrize("second", ["all", "random", "sampling"])
def test_evaluation_takes_no_chance_and_changes_nothing(second: str) -> None:
    made, x = router(second=second).eval(), tokens()
    before, generator = {name: value.clone() for name, value in made.state_dict().items()}, torch.get_rng_state()
    first, again = made(x, None), made(x, None)
    assert torch.equal(first.experts, again.experts)
    assert torch.equal(first.experts, first.logits.topk(2).indices)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_router_stays_in_fp32(dtype: torch.dtype) -> None:
    made = make_router(kl.MoE(experts=6, loss_free=1e-3), 8, Plan())
    for tensor in made.state_dict().values():
        tensor.normal_()
    before = {name: value.clone() for name, value in made.state_dict().items()}
    with new_tensors(dtype=dtype):
        rounded = make_router(kl.MoE(experts=6), 8, Plan())
    for converted in (made.to(dtype), made.half(), rounded):
        assert {value.dtype for value in converted.state_dict().values()} == {torch.float32}
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    assert made.double().weight.dtype == torch.float64
    made.float()
    x = tokens().to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        choice = made(x, None)
    assert choice.logits.dtype == choice.weights.dtype == torch.float32
    assert torch.equal(choice.logits, made(x.float(), None).logits)


@pytest.mark.parametrize("options", [{"gate": "sigmoid"}, {"router": "linear", "loss_free": 1e-3}], ids=str)
def test_the_chosen_share_a_token_also_where_their_gates_are_nothing(options: dict[str, Any]) -> None:
    made = make_router(kl.MoE(experts=3, router_dim=None if "router" in options else 1, **options), 1, Plan())
    with torch.no_grad():
        if isinstance(made, CosineRouter):  # both sides have one dimension: all experts are opposite to a token above 0
            made.weight.fill_(1.0)
            made.embeddings.fill_(-1.0)
            made.log_temperature.fill_(-100.0)
            expected = [0.5, 0.5]
        else:  # the best expert is not chosen
            assert made.selection_bias is not None
            made.weight.copy_(torch.tensor([[300.0], [1.0], [0.0]]))
            made.selection_bias.copy_(torch.tensor([-2.0, 0.5, 0.0]))
            expected = [1 / (1 + 2.718281828459045**-1), 1 / (1 + 2.718281828459045)]
    choice = made(torch.ones(1, 1), None)
    assert choice.weights[0].tolist() == pytest.approx(expected)


def test_selection_reads_scores_where_gates_are_all_nothing() -> None:
    made = make_router(kl.MoE(experts=4, top_k=2, router="linear"), 1, Plan())
    with torch.no_grad():
        made.weight.copy_(torch.tensor([[0.0], [300.0], [100.0], [200.0]]))
    choice = made(torch.ones(1, 1), None)
    assert choice.experts.tolist() == [[1, 3]]
