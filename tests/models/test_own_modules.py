"""A user's own module in a layer: it runs, trains, decodes and is measured; what cannot take it says so."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kilolayer as kl
from kilolayer.errors import FoldError, InputError, OptionError
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.search import generate
from kilolayer.layers.attention import SelfAttention
from kilolayer.probe.attention_entropy import attention_entropy
from kilolayer.probe.dead_units import dead_units
from kilolayer.probe.propagation import gradient_profile
from kilolayer.speed.written import unroll_for_cpu

TOKENS = torch.tensor([[3, 5, 2, 9, 4], [7, 1, 8, 6, 2]])


class TanhNetwork(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Averaging(nn.Module):
    """Every position takes the mean of all that it may see."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.value = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Any, rotation: Any = None, cache: Any = None, past: Any = 0) -> Tensor:
        value = self.value(x)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
        return seen / seen.sum(-1, keepdim=True) @ value


def with_own(part: str = "feedforward", recipe: str = "deepnorm", **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = kl.Decoder(11, 16, 2, 24, 2, recipe=recipe, dtype=torch.float64, **options)
    own = TanhNetwork(16) if part == "feedforward" else Averaging(16)
    getattr(model.decoder.blocks[1 if part == "feedforward" else 0], part).f = own.double()
    return model


def loss_of(model: Any) -> Tensor:
    return F.cross_entropy(model(TOKENS[:, :-1]).logits.flatten(0, 1), TOKENS[:, 1:].flatten())


def test_the_layer_is_the_recipes_equation_around_it() -> None:
    model = with_own()
    inputs: list[Tensor] = []
    sublayer = model.decoder.blocks[1].feedforward
    sublayer.register_forward_hook(lambda _, given, found: inputs.extend((given[0], found)))
    model(TOKENS)
    x, y = inputs
    alpha = (2 * 2) ** 0.25
    expected = F.layer_norm(alpha * x + torch.tanh(sublayer.f.inner(x)), (16,), eps=1e-5)
    torch.testing.assert_close(y, expected)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("part", ["feedforward", "self_attention"])
@pytest.mark.parametrize("recipe", ["deepnorm", "pre_ln"])
def test_it_trains_with_groups_clipping_and_the_fast_form(part: str, recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    model = with_own(part, recipe)
    weights = [weight for group in kl.parameter_groups(model, lr=1e-2, weight_decay=0.1) for weight in group["params"]]
    assert set(weights) == set(model.parameters())
    optimizer = torch.optim.AdamW(kl.parameter_groups(model, lr=1e-2))
    with caplog.at_level(logging.WARNING):
        fast = kl.fast(model)
        torch.testing.assert_close(fast(TOKENS).logits, model(TOKENS).logits)
        first = float(loss_of(fast).detach())
        for _ in range(5):
            optimizer.zero_grad()
            loss_of(fast).backward()
            assert math.isfinite(kl.clip_grad_norm_(model, 1.0).total)
            optimizer.step()
    assert float(loss_of(model).detach()) < first
    kind = "TanhNetwork" if part == "feedforward" else "Averaging"
    assert sum(f"{part}.f is a {kind}" in record.message for record in caplog.records) == 1


def test_a_matrix_of_ones_own_learns_as_one_of_the_feed_forward_network() -> None:
    model = with_own(recipe="complete_p")
    rate = {weight: group["lr"] for group in kl.parameter_groups(model, lr=1.0) for weight in group["params"]}
    theirs, ours = model.decoder.blocks[1].feedforward.f.inner, model.decoder.blocks[0].feedforward.f.input
    assert rate[theirs.weight] == rate[ours.weight] == 16.0  # base width 256, depth 2
    assert rate[theirs.bias] == rate[ours.bias] == 1.0


def test_state_dicts_hold_it_and_a_configuration_does_not(tmp_path: Any) -> None:
    model, other = with_own(), with_own()
    nn.init.ones_(model.decoder.blocks[1].feedforward.f.inner.weight)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(TOKENS).logits, model(TOKENS).logits)
    with pytest.raises(InputError, match="not the one that its configuration describes"):
        kl.save(model, tmp_path / "saved")


def test_it_decodes_with_a_cache_as_without() -> None:
    model = with_own().eval()
    cache = model.new_cache(5)
    steps = [model(TOKENS[:, i : i + 1], cache=cache).logits for i in range(5)]
    torch.testing.assert_close(torch.cat(steps, dim=1), model(TOKENS).logits)
    assert unroll_for_cpu(model) is model
    search = SearchConfig(method="greedy", max_length_factor=0.0, max_length_extra=4)
    assert len(generate(model, TOKENS, search)) == 2


def test_an_attention_that_keeps_nothing_is_refused_in_decoding() -> None:
    model = with_own("self_attention").eval()
    assert model(TOKENS, attention_weights=True).attention[0] is None
    with pytest.raises(InputError, match="the attention of layer 1 has kept no keys and values"):
        model(TOKENS, cache=model.new_cache(5))


def test_one_that_extends_ours_gives_weights_and_decodes() -> None:
    class Sharper(SelfAttention):
        def mix(self, query_BHLD: Tensor, key_BHLD: Tensor, value_BHLD: Tensor, mask: Any) -> Tensor:
            return super().mix(2 * query_BHLD, key_BHLD, value_BHLD, mask)

    model = with_own().eval()
    attention = model.decoder.blocks[0].self_attention.f
    plain = model(TOKENS, attention_weights=True).attention[0]
    attention.__class__ = Sharper
    found = model(TOKENS, attention_weights=True).attention[0]
    torch.testing.assert_close(found, (2 * plain.log()).softmax(-1))
    cache = model.new_cache(5)
    steps = [model(TOKENS[:, i : i + 1], cache=cache).logits for i in range(5)]
    torch.testing.assert_close(torch.cat(steps, dim=1), model(TOKENS).logits)


@pytest.mark.parametrize("part", ["feedforward", "self_attention"])
def test_probes_measure_it_or_pass_over_it(part: str) -> None:
    model = with_own(part)
    assert all(norm > 0 for norm in gradient_profile(model, loss_of).decoder)
    entropy = attention_entropy(model, loss_of)["decoder"]["self_attention"]
    assert math.isnan(entropy[0]) is (part == "self_attention")
    shares = dead_units(model, loss_of)["decoder"]
    assert math.isnan(shares[1]) is (part == "feedforward")


def test_what_cannot_take_it_says_so() -> None:
    model = with_own()
    with pytest.raises(FoldError, match="a module that fold does not know"):
        kl.fold(model)
    with pytest.raises(OptionError, match="cannot be computed in int8"):
        unroll_for_cpu(model.float(), int8=True)
    with pytest.raises(InputError, match=r"(?s)a Linear has weight, bias.*feedforward\.f\.inner"):
        model.initialize()
