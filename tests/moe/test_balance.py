"""Losses and biases that even out the experts' loads."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import kilolayer as kl
from kilolayer.errors import InputError
from kilolayer.moe.balance import Statistics, statistics, token_sums
from kilolayer.moe.router import Choice
from tests.moe.naive_experts import make_layer


def chosen(experts: list[list[int]], shares: list[list[float]]) -> Choice:
    values = torch.tensor(shares, dtype=torch.float64)
    logits = values.log()
    return Choice(torch.tensor(experts), torch.ones(len(experts), 1), logits, values, values)


def measured(choice: Choice, real: Tensor | None = None) -> Statistics:
    return statistics(choice, real, token_sums(choice, real))


def test_the_balance_loss_by_hand() -> None:
    choice = chosen([[0], [0], [1], [2]], [[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8]])
    found = measured(choice)
    # m = (0.4, 0.275, 0.325), c = (0.5, 0.25, 0.25)
    assert float(found.balance) == pytest.approx(3 * (0.4 * 0.5 + 0.275 * 0.25 + 0.325 * 0.25))
    assert found.first.tolist() == [0.5, 0.25, 0.25]
    assert float(found.z) == pytest.approx(0.0)  # the logarithms of shares that sum to 1
    assert float(found.entropy) == pytest.approx(-sum(p * math.log(p) for row in choice.gates.tolist() for p in row) / 4)


def test_padding_counts_nowhere() -> None:
    choice = chosen([[0], [3], [1]], [[0.7, 0.2, 0.1], [0.0, 0.0, 1.0], [0.2, 0.5, 0.3]])
    found = measured(choice, torch.tensor([True, False, True]))
    assert float(found.balance) == pytest.approx(3 * (0.45 * 0.5 + 0.35 * 0.5))
    assert found.first.tolist() == [0.5, 0.5, 0]


def test_even_loads_have_the_loss_one() -> None:
    even = chosen([[0], [1], [2]], [[1 / 3] * 3] * 3)
    one_sided = chosen([[0]] * 3, [[1.0, 0.0, 0.0]] * 3)
    assert float(measured(even).balance) == pytest.approx(1.0)
    assert float(measured(one_sided).balance) == pytest.approx(3.0)
    assert float(measured(one_sided).entropy) == 0.0


def test_z_by_hand() -> None:
    choice = chosen([[0], [1]], [[0.5, 0.5]] * 2)._replace(logits=torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    assert float(measured(choice).z) == pytest.approx((math.log(2) ** 2 + (1 + math.log(2)) ** 2) / 2)


def test_the_balance_loss_moves_routers_towards_even_loads() -> None:
    torch.manual_seed(1)
    layer = make_layer(kl.MoE(experts=4, top_k=1, balance=1.0)).train()
    x = torch.randn(1, 200, 6, dtype=torch.float64) + 1
    before = layer(x)[1]
    optimizer = torch.optim.Adam(layer.router.parameters(), 0.03)
    for _ in range(60):
        optimizer.zero_grad()
        layer(x)[1].router_loss.backward()
        optimizer.step()
    after = layer(x)[1]
    assert after.load.max() < 0.75 * before.load.max()
    assert float(after.router_loss.detach()) < float(before.router_loss.detach())


@pytest.mark.parametrize("router", ["xmoe", "linear"])
def test_loss_free_biases_move_loads_towards_the_mean(router: str) -> None:
    layer = make_layer(kl.MoE(experts=4, router=router, loss_free=0.01)).train()  # pyright: ignore[reportArgumentType]
    assert layer.router.selection_bias is not None
    layer.router.selection_bias.zero_()
    x = torch.randn(1, 200, 6, dtype=torch.float64) + 0.5

    def spread_of(load: Tensor) -> float:
        return float((load - load.double().mean()).abs().max())

    before = layer(x)[1].load
    for _ in range(100):
        kl.update_balance(layer, [layer(x)[1].load])
    after = layer(x)[1].load
    assert int(after.sum()) == 400
    assert spread_of(after) < 0.3 * spread_of(before)


def test_a_bias_moves_by_the_rate_against_the_load() -> None:
    layer = make_layer(kl.MoE(experts=4, loss_free=0.01))
    assert layer.router.selection_bias is not None
    before = layer.router.selection_bias.clone()
    kl.update_balance(layer, [torch.tensor([7, 1, 4, 4])])
    moved = layer.router.selection_bias - before
    torch.testing.assert_close(moved, torch.tensor([-0.01, 0.01, 0.0, 0.0], dtype=torch.float64))


def test_the_whole_output_is_no_list_of_loads() -> None:
    model = kl.Encoder(9, 8, 2, 8, 2, moe=kl.MoE(experts=4, loss_free=0.01))
    out = model(torch.ones(1, 3).long())
    with pytest.raises(InputError, match=r"given as EncoderOutput[\s\S]*layer.load for layer in out.routing"):
        kl.update_balance(model, out)  # pyright: ignore[reportArgumentType]


def test_biases_are_state_and_change_weights_of_nobody() -> None:
    layer = make_layer(kl.MoE(experts=4, top_k=4, loss_free=1e-3))
    assert "router.selection_bias" in layer.state_dict()
    assert "router.selection_bias" not in make_layer(kl.MoE(experts=4)).state_dict()
    assert "router.selection_bias" not in dict(layer.named_parameters())
    x = torch.randn(1, 20, 6, dtype=torch.float64)
    before = layer(x)[0]
    kl.update_balance(layer, [torch.tensor([9, 0, 1, 2])])
    torch.testing.assert_close(layer(x)[0], before)  # all four are chosen, whatever the biases


def test_a_forward_moves_no_bias() -> None:
    layer = make_layer(kl.MoE(experts=4, loss_free=1e-3)).train()
    assert layer.router.selection_bias is not None
    before = layer.router.selection_bias.clone()
    layer(torch.randn(1, 20, 6, dtype=torch.float64))[0].sum().backward()
    assert torch.equal(layer.router.selection_bias, before)


def test_loss_free_leaves_the_balance_loss_out_unless_it_is_asked_for() -> None:
    assert kl.MoE(loss_free=1e-3).balance_weight == 0
    assert kl.MoE(loss_free=1e-3, balance=1e-4).balance_weight == 1e-4
    assert kl.MoE().balance_weight == 0.01
    assert kl.MoE(balance=0.0).balance_weight == 0


def test_loads_that_do_not_fit_are_refused() -> None:
    layer = make_layer(kl.MoE(experts=4))
    with pytest.raises(InputError, match="1 load for 0 layers"):
        kl.update_balance(layer, [torch.zeros(4)])
    balanced = make_layer(kl.MoE(experts=4, loss_free=1e-3))
    routing = balanced(torch.randn(1, 3, 6, dtype=torch.float64))[1]
    for wrong in (torch.ones(1), torch.ones(3), routing):
        with pytest.raises(InputError, match="not have 4 numbers, one for each expert"):
            kl.update_balance(balanced, [wrong])
