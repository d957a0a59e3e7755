from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from kilolayer.errors import InputError
from kilolayer.optimizers.optimizer import Optimizer, make_optimizer
from kilolayer.tasks.train_config import TrainConfig

KINDS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "radam": partial(torch.optim.RAdam, decoupled_weight_decay=True)}


def small_model() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 7, bias=False))
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
    model.register_parameter("frozen", nn.Parameter(torch.ones(3, 3), requires_grad=False))
    return model


YES, ONE = torch.tensor(True), torch.tensor(1.0)


def some_steps(model: nn.Module, optimizer: Any, count: int, seed: int, measures: bool = False) -> Any:
    generator, found = torch.Generator().manual_seed(seed), None
    for _ in range(count):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        if isinstance(optimizer, Optimizer):
            optimizer.collect()
            found = optimizer.update(ONE.to(optimizer.device), YES.to(optimizer.device), measures)
            optimizer.clear()
        else:
            optimizer.step()
    return found


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_norm_of_many_numbers_is_exact() -> None:
    model = nn.Linear(1024, 1024)
    optimizer = make_optimizer(model, TrainConfig(), sums=True)
    gradients = [torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) for weight in model.parameters()]
    for weight, gradient in zip(model.parameters(), gradients, strict=True):
        weight.grad = gradient.clone()
    optimizer.collect()
    exact = torch.cat([gradient.double().flatten() for gradient in gradients]).norm()
    assert float(optimizer.norms()[0]) == pytest.approx(float(exact), rel=2e-7)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beta2", [0.95, 0.5])  # RAdam's rectification starts after 5 updates, or never
@pytest.mark.parametrize("sums", [False, True])
def test_it_follows_torchs_own(kind: Any, beta2: float, sums: bool) -> None:
    config = TrainConfig(optimizer=kind, lr=0.1, beta1=0.8, beta2=beta2, eps=1e-6, weight_decay=0.3)
    model, peer = small_model(), small_model()
    optimizer = make_optimizer(model, config, sums=sums)
    trained = [parameter for parameter in peer.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() >= 2], "weight_decay": 0.3},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    reference = KINDS[kind](groups, lr=0.1, betas=(0.8, beta2), eps=1e-6, foreach=False)
    for seed in range(8):
        some_steps(model, optimizer, 1, seed)
        some_steps(peer, reference, 1, seed)
        for name, tensor in weights(model).items():
            torch.testing.assert_close(tensor, weights(peer)[name], rtol=1e-5, atol=1e-6)
    assert torch.equal(model.get_parameter("frozen"), torch.ones(3, 3))


def test_a_scale_on_the_gradient_is_a_smaller_gradient() -> None:
    model, peer = small_model(), small_model()
    ours, theirs = (make_optimizer(each, TrainConfig(lr=0.1, eps=0.1, weight_decay=0.2)) for each in (model, peer))
    for each, factor in ((model, 8.0), (peer, 1.0)):
        generator = torch.Generator().manual_seed(1)
        for parameter in each.parameters():
            parameter.grad = factor * torch.randn(parameter.shape, generator=generator) if parameter.requires_grad else None
    ours.update(ONE / 8, YES)
    theirs.update(ONE, YES)
    assert same(weights(model), weights(peer))


@pytest.mark.parametrize("sums", [False, True])
def test_rounded_weights_move_by_steps_that_they_could_not_hold(sums: bool) -> None:
    model = nn.Linear(8, 8, bias=False)
    start = model.weight.detach().clone()
    precise = {model.weight: start}
    model.weight.data = start.bfloat16()
    optimizer = make_optimizer(model, TrainConfig(lr=1e-5), precise, sums=sums)
    for _ in range(100):
        model.weight.grad = torch.ones(8, 8, dtype=torch.bfloat16)
        optimizer.collect()
        optimizer.update(ONE, YES)
        optimizer.clear()
    torch.testing.assert_close(optimizer.precise()["weight"], start - 100 * 1e-5, rtol=0, atol=1e-5)
    assert torch.equal(model.weight, optimizer.precise()["weight"].bfloat16())


def test_matrices_and_tables_are_decayed_and_vectors_and_scalars_are_not() -> None:
    model = small_model()
    optimizer = make_optimizer(model, TrainConfig(optimizer="adamw", lr=0.1, weight_decay=0.5))
    before = weights(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.update(ONE, YES)
    shrunk = {name for name, tensor in weights(model).items() if not torch.equal(tensor, before[name])}
    assert shrunk == {"0.weight", "1.weight", "3.weight"}
    assert torch.allclose(model.get_parameter("1.weight"), before["1.weight"] * (1 - 0.1 * 0.5))


def test_a_weight_without_a_gradient_is_left_alone() -> None:
    model = small_model()
    optimizer = make_optimizer(model, TrainConfig(lr=0.1, weight_decay=0.5))
    before = weights(model)
    model.get_parameter("1.weight").grad = torch.ones(4, 4)
    optimizer.update(ONE, YES)
    assert {name for name, tensor in weights(model).items() if not torch.equal(tensor, before[name])} == {"1.weight"}
    assert float(optimizer.norms()[0]) == pytest.approx(4.0)


@pytest.mark.parametrize("kind", KINDS)
def test_norms_of_changes_are_those_of_the_weights(kind: Any) -> None:
    model = small_model()
    optimizer = make_optimizer(model, TrainConfig(optimizer=kind, lr=0.1, weight_decay=0.3))
    for seed in range(7):
        before = [weight.detach().clone() for group in optimizer.groups for weight in group.weights]
        found = some_steps(model, optimizer, 1, seed, measures=True)
        after = [weight for group in optimizer.groups for weight in group.weights]
    expected = torch.stack([(new - old).norm() for new, old in zip(after, before, strict=True)])
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-3, atol=1e-6)


def test_the_learning_rate_is_that_of_the_next_step() -> None:
    model = small_model()
    optimizer = make_optimizer(model, TrainConfig(lr=0.1))
    optimizer.lr.fill_(0.0)
    before = weights(model)
    some_steps(model, optimizer, 1, seed=1)
    assert same(weights(model), before)


@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_round_by_name_and_training_goes_on_to_the_bit(kind: Any) -> None:
    config = TrainConfig(optimizer=kind, lr=0.1, weight_decay=0.1)
    straight, broken = small_model(), small_model()
    whole, first = make_optimizer(straight, config), make_optimizer(broken, config)
    some_steps(straight, whole, 4, seed=1)
    some_steps(broken, first, 4, seed=1)
    tensors = {name: tensor.clone() for name, tensor in first.tensors().items()}
    assert {"0.weight/mean", "0.weight/square", "scale/mean", "updates"} <= tensors.keys()
    assert not any(name.startswith("frozen") for name in tensors)
    fresh = make_optimizer(broken, config)
    fresh.load(dict(reversed(tensors.items())))  # by name: the order does not matter
    assert same(fresh.tensors(), tensors)
    some_steps(straight, whole, 3, seed=2)
    some_steps(broken, fresh, 3, seed=2)
    assert same(weights(straight), weights(broken))


def test_state_of_another_model_is_refused_by_name() -> None:
    optimizer = make_optimizer(small_model(), TrainConfig())
    with pytest.raises(InputError, match=r"9\.weight/mean is float32 \[1\] there and missing here"):
        optimizer.load(optimizer.tensors() | {"9.weight/mean": torch.zeros(1)})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [3, 40])
def test_the_settled_direction_is_what_the_next_update_multiplies_by_the_rate(kind: str, count: int) -> None:
    model = small_model()
    optimizer = make_optimizer(model, TrainConfig(optimizer=kind, lr=1e-3))  # pyright: ignore[reportArgumentType]
    gradients = {weight: torch.linspace(-1, 2, weight.numel()).view_as(weight) for weight in model.parameters()}
    for taken in range(count + 1):
        if taken == count:
            directions = optimizer.settled_directions()
            before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        for weight, gradient in gradients.items():
            weight.grad = gradient if weight.requires_grad else None
        optimizer.collect()
        optimizer.update(ONE, YES)
        optimizer.clear()
    for name, direction in directions.items():
        moved = (before[name] - model.get_parameter(name).detach()) / 1e-3
        torch.testing.assert_close(direction, moved, rtol=0.05, atol=1e-3)
