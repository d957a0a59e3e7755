"""Tools of others on our models: torch.export, and PEFT's LoRA."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import kilolayer as kl
from kilolayer.errors import FoldError
from kilolayer.layers.projection import Projection
from kilolayer.speed.written import unroll_for_cpu

TOKENS = torch.tensor([[3, 5, 2, 9, 4], [7, 1, 8, 6, 2]])
LONGER = torch.tensor([[3, 5, 2, 9, 4, 1, 7], [7, 1, 8, 6, 2, 0, 0], [1, 2, 3, 4, 0, 0, 0]])
SMALL: dict[str, Any] = {"vocab_size": 11, "dim": 16, "heads": 2, "ffn_dim": 24}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: kl.Encoder(**SMALL, layers=1, recipe="sub_ln"), marks=pytest.mark.slow, id="encoder"),
        pytest.param(lambda: kl.Decoder(**SMALL, layers=1, positions="rotary"), marks=pytest.mark.slow, id="decoder"),
        pytest.param(
            lambda: kl.EncoderDecoder(**SMALL, encoder_layers=1, decoder_layers=1), marks=pytest.mark.slow, id="encoder_decoder"
        ),
    ],
)
def test_an_exported_model_is_the_model_at_other_sizes_too(make: Any) -> None:
    model = make().eval()
    few, many = ((each, each) if isinstance(model, kl.EncoderDecoder) else (each,) for each in (TOKENS, LONGER))
    rows = torch.export.Dim("rows")
    sizes = tuple({0: rows, 1: torch.export.Dim(f"length_{index}")} for index in range(len(few)))
    exported = torch.export.export(model, few, dynamic_shapes=sizes).module()
    for batch in (few, many):
        found, expected = exported(*batch), model(*batch)
        assert type(found) is type(expected)
        torch.testing.assert_close(found.logits, expected.logits)
        torch.testing.assert_close(found.states, expected.states)


def test_outputs_are_trees_of_their_tensors() -> None:
    model: Any = kl.Decoder(**SMALL, layers=2, moe=kl.MoE(experts=2, every=1))
    out: Any = model(TOKENS, hidden_states=True, attention_weights=True)
    doubled = pytree.tree_map(lambda leaf: leaf * 2 if isinstance(leaf, torch.Tensor) else leaf, out)
    assert type(doubled) is type(out)
    torch.testing.assert_close(doubled.attention[1], out.attention[1] * 2)
    torch.testing.assert_close(doubled.routing[0].load, out.routing[0].load * 2)


def test_a_projection_is_a_linear_layer_that_draws_nothing_from_torchs_generator() -> None:
    torch.manual_seed(4)
    expected = torch.randint(2**62, ()), torch.rand(3)
    torch.manual_seed(4)
    model: Any = kl.Decoder(**SMALL, layers=2)
    assert model.seed == int(expected[0])
    assert torch.equal(torch.rand(3), expected[1])
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(linear) == 2 * 4
    assert all(isinstance(module, Projection) for module in linear)
    layer = linear[0]
    assert (layer.in_features, layer.out_features) == tuple(reversed(layer.weight.shape))


@pytest.mark.filterwarnings("ignore")
def test_lora_trains_its_own_weights_and_merges(caplog: pytest.LogCaptureFixture) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model: Any = kl.Decoder(**SMALL, layers=2, recipe="deepnorm", dtype=torch.float64)
    start = {name: weight.clone() for name, weight in model.state_dict().items()}
    before = model(TOKENS).logits
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["query_key_value", "output", "input"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned = peft.get_peft_model(model, config).double()
    torch.testing.assert_close(tuned(TOKENS).logits, before)
    groups = kl.parameter_groups(tuned, lr=5e-2)
    trained = {name for name, weight in tuned.named_parameters() if weight.requires_grad}
    assert sum(len(group["params"]) for group in groups) == len(trained) == 2 * 2 * 4
    assert all("lora_" in name for name in trained)
    optimizer = torch.optim.AdamW(groups)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.cross_entropy(tuned(TOKENS[:, :-1]).logits.flatten(0, 1), TOKENS[:, 1:].flatten())
        loss.backward()
        assert {name for name, weight in tuned.named_parameters() if weight.grad is not None} == trained
        kl.clip_grad_norm_(tuned, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]

    after = tuned(TOKENS).logits.detach()
    assert not torch.allclose(after, before)
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(kl.fast(tuned)(TOKENS).logits, after)
    assert "run as plain modules" in caplog.text
    assert unroll_for_cpu(model.eval()) is model
    with pytest.raises(FoldError, match="a module that fold does not know"):
        kl.fold(model)

    merged = tuned.merge_and_unload()
    torch.testing.assert_close(merged(TOKENS).logits, after)
    assert merged.state_dict().keys() == start.keys()
    changed = {name for name, weight in merged.state_dict().items() if not torch.equal(weight, start[name])}
    assert changed == {name for name in start if ".f." in name and name.endswith("weight")}
    torch.testing.assert_close(kl.fold(merged.eval())(TOKENS).logits, after)
