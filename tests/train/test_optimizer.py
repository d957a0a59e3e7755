from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kilolayer.errors import InputError
from kilolayer.train.config import TrainConfig
from kilolayer.train.optimizer import load_optimizer, make_optimizer, optimizer_tensors, set_learning_rate

KINDS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "radam": torch.optim.RAdam}


def small_model() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 7, bias=False))
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
    model.register_parameter("frozen", nn.Parameter(torch.ones(3, 3), requires_grad=False))
    return model


def some_steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_torchs_own_with_the_options_given(kind: Any) -> None:
    config = TrainConfig(optimizer=kind, lr=0.1, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.3)
    model, peer = small_model(), small_model()
    optimizer = make_optimizer(model, config)
    assert type(optimizer) is KINDS[kind]
    trained = [parameter for parameter in peer.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() >= 2], "weight_decay": 0.3},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    reference = KINDS[kind](groups, lr=0.1, betas=(0.8, 0.95), eps=1e-6, foreach=False)
    some_steps(model, optimizer, 8, seed=5)
    some_steps(peer, reference, 8, seed=5)
    for name, tensor in weights(model).items():
        torch.testing.assert_close(tensor, weights(peer)[name], rtol=1e-5, atol=1e-6)
    assert torch.equal(model.get_parameter("frozen"), torch.ones(3, 3))


def test_matrices_and_tables_are_decayed_and_vectors_and_scalars_are_not() -> None:
    model = small_model()
    optimizer = make_optimizer(model, TrainConfig(optimizer="adamw", lr=0.1, weight_decay=0.5))
    before = weights(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    shrunk = {name for name, tensor in weights(model).items() if not torch.equal(tensor, before[name])}
    assert shrunk == {"0.weight", "1.weight", "3.weight"}
    assert torch.allclose(model.get_parameter("1.weight"), before["1.weight"] * (1 - 0.1 * 0.5))


def test_the_learning_rate_is_that_of_the_next_step() -> None:
    model = small_model()
    optimizer = make_optimizer(model, TrainConfig(lr=0.1))
    set_learning_rate(optimizer, 0.0)
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
    tensors = {name: tensor.clone() for name, tensor in optimizer_tensors(broken, first).items()}
    assert {"0.weight/exp_avg", "0.weight/exp_avg_sq", "0.weight/step", "scale/exp_avg"} <= tensors.keys()
    assert not any(name.startswith("frozen") for name in tensors)
    fresh = make_optimizer(broken, config)
    load_optimizer(broken, fresh, dict(reversed(tensors.items())))  # by name: the order does not matter
    assert same(optimizer_tensors(broken, fresh), tensors)
    some_steps(straight, whole, 3, seed=2)
    some_steps(broken, fresh, 3, seed=2)
    assert same(weights(straight), weights(broken))


def test_state_of_another_model_is_refused_by_name() -> None:
    model = small_model()
    with pytest.raises(InputError, match=r"'9\.weight'"):
        load_optimizer(model, make_optimizer(model, TrainConfig()), {"9.weight/exp_avg": torch.zeros(1)})
