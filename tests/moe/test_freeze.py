"""Fine-tuning with frozen routers and experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kilolayer as kl
from kilolayer.errors import InputError

TOKENS = torch.randint(1, 11, (4, 9), generator=torch.Generator().manual_seed(1))


def build(recipe: str = "sub_ln", balance: float = 0.5) -> kl.Decoder:
    torch.manual_seed(3)
    moe = kl.MoE(experts=4, balance=balance)
    return kl.Decoder(11, 16, 2, 24, 4, recipe=recipe, moe=moe, dtype=torch.float64).train()


def gradients(model: kl.Decoder, router_loss_alone: bool = False) -> dict[str, Tensor]:
    out = model(TOKENS)
    (out.router_loss + (0 if router_loss_alone else out.logits.logsumexp(-1).mean())).backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("recipe", ["sub_ln", "r_fixup"])
def test_all_else_has_the_gradients_that_it_had(recipe: str) -> None:
    free, frozen = build(recipe), build(recipe)
    kl.freeze_experts(frozen)
    expected, found = gradients(free), gradients(frozen)
    assert set(expected) - set(found) == {name for name in expected if "router" in name or "experts" in name}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-15)


def test_the_balance_loss_reaches_the_layers_below() -> None:
    model = build()
    kl.freeze_experts(model)
    found = gradients(model, router_loss_alone=True)
    assert float(found["decoder.blocks.0.feedforward.f.input.weight"].norm()) > 0
    assert float(found["embedding.weight"].norm()) > 0


def test_training_evens_out_loads_with_experts_as_they_were() -> None:
    model = build()
    kl.freeze_experts(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = float(model(TOKENS).router_loss.detach())
    optimizer = torch.optim.Adam([weight for weight in model.parameters() if weight.requires_grad], 1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        model(TOKENS).router_loss.backward()
        optimizer.step()
    assert float(model(TOKENS).router_loss.detach()) < first
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert not {name for name in changed if "router" in name or "experts" in name}


def test_frozen_experts_count_as_nothing_when_clipping() -> None:
    model = build()
    kl.freeze_experts(model)
    gradients(model)
    assert float(kl.clip_grad_norm_(model, 1.0).expert) == 0


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(InputError, match="this model has no experts"):
        kl.freeze_experts(kl.Decoder(11, 16, 2, 24, 2))
