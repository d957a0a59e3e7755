"""The kernels of the update against the rules, which are tested against torch's optimizers."""

from __future__ import annotations

import copy
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn

import kilolayer as kl
from kilolayer.optimizers import weight_factors
from kilolayer.optimizers.hidden_matrices import HiddenMatrix
from kilolayer.optimizers.optimizer import make_optimizer
from kilolayer.optimizers.rules import muon
from kilolayer.optimizers.rules.muon import Orthogonal
from kilolayer.recipes.base import Rates
from kilolayer.speed.runtime import FAST
from kilolayer.tasks.train_config import TrainConfig


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["adam", "adamw", "radam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("rates", [[1.0], [1.0, 0.5, 0.01]], ids=["even", "uneven"])
@pytest.mark.parametrize("eps", [1.0, 1e4])
def test_the_kernel_does_what_the_rules_do(
    kind: Any, dtype: torch.dtype, sums: bool, rates: list[float], eps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        weight_factors, "recipe_rates", lambda model: dict.fromkeys(model.parameters(), Rates(eps=eps, decay=2.0))
    )
    monkeypatch.setattr(
        weight_factors, "layer_rates", lambda model, decay: dict(zip(model.parameters(), cycle(rates), strict=False))
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 90), nn.LayerNorm(90), nn.Linear(90, 33, bias=False)).to("cuda")
    peer = copy.deepcopy(model)
    config = TrainConfig(optimizer=kind, lr=0.1, weight_decay=0.1)
    optimizers = []
    for each in (model, peer):
        precise = {parameter: parameter.data for parameter in each.parameters() if parameter.dim() > 1}
        for parameter in precise:
            parameter.data = parameter.data.to(dtype)
        optimizers.append(make_optimizer(each, config, None if dtype == torch.float32 else precise, sums=sums, runtime=FAST))
    ours, theirs = optimizers
    theirs.kernel, theirs.waits = None, True
    third = torch.tensor(1 / 3, device="cuda")
    for step in range(8):
        generator = torch.Generator("cuda").manual_seed(step)
        for batch in range(3 if sums else 1):
            for offset, (a, b) in enumerate(zip(model.parameters(), peer.parameters(), strict=True)):
                absent = sums and offset == batch
                a.grad = None if absent else torch.randn(a.shape, generator=generator, device="cuda").to(a.dtype)
                b.grad = None if absent else a.grad.clone()
            ours.collect()
            theirs.collect()
        norms = [each.norm() for each in theirs.gradient_norms()]
        torch.testing.assert_close(ours.norms()[0], torch.stack(norms).norm().double(), rtol=1e-5, atol=0)
        finite = torch.tensor(step != 3, device="cuda")
        for each in optimizers:
            each.update(third, finite)
        ours.clear()
        theirs.clear()
        for name, tensor in ours.precise().items():
            torch.testing.assert_close(tensor, theirs.precise()[name], rtol=1e-5, atol=1e-6)
        for a, b in zip(model.parameters(), peer.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-6)
    assert float(ours.taken) == 7


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("at_once", [2**27, 5000])
def test_the_kernel_of_matrices_does_what_the_rule_does(
    dtype: torch.dtype, nesterov: bool, sums: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Orthogonal, "directions", lambda rule, inputs: inputs / 4)
    monkeypatch.setattr(muon, "AT_ONCE", at_once)
    shape: dict[str, Any] = {"layers": 3, "dim": 48, "heads": 2, "ffn_dim": 50, "vocab_size": 40}
    made = [kl.build_model(kl.ModelConfig(shape="decoder", **shape), seed=1).to("cuda") for _ in range(2)]
    config = TrainConfig(optimizer={"name": "muon", "nesterov": nesterov}, lr=0.1, weight_decay=0.1, layer_decay=0.9)
    optimizers = []
    for each in made:
        precise = None if dtype == torch.float32 else each.cast_weights(dtype, torch.float32)
        optimizers.append(make_optimizer(each, config, precise, sums=sums, runtime=FAST))
    ours, theirs = optimizers
    theirs.kernel, theirs.waits = None, True
    for step in range(6):
        finite = torch.tensor(step not in (0, 3), device="cuda")
        generator = torch.Generator("cuda").manual_seed(step)
        for offset, (a, b) in enumerate(zip(made[0].parameters(), made[1].parameters(), strict=True)):
            drawn = torch.randn(a.shape, generator=generator, device="cuda").to(a.dtype)
            a.grad = None if offset % 5 == step and not sums else drawn if finite else drawn * torch.nan
            b.grad = None if a.grad is None else a.grad.clone()
        for each in optimizers:
            each.collect()
        changes = [each.update(torch.tensor(0.5, device="cuda"), finite, measures=True) for each in optimizers]
        for each in optimizers:
            each.clear()
        for group, *norms in zip(ours.groups, *(each or [] for each in changes), strict=True):
            if isinstance(group.rule, Orthogonal):
                torch.testing.assert_close(*norms, rtol=5e-3, atol=1e-7)
        for name, tensor in ours.tensors().items():
            torch.testing.assert_close(tensor, theirs.tensors()[name], rtol=1e-5, atol=1e-7)
        for name, tensor in ours.precise().items():  # what is subtracted was rounded to bf16
            torch.testing.assert_close(tensor, theirs.precise()[name], rtol=1e-5, atol=1e-3)
            rounded = made[0].get_parameter(name)
            assert torch.equal(rounded, tensor.to(rounded.dtype))
    assert float(ours.taken) == 4


@pytest.mark.gpu
def test_orthogonal_matrices_of_the_kernel_are_those_of_the_rule() -> None:
    weights = [nn.Linear(96, 96, bias=False).to("cuda") for _ in range(2)]
    rule = Orthogonal(0.9, True, 5, "original", HiddenMatrix((32, 64)), 0.0)
    stacked = torch.stack([each.weight.detach() for each in weights])
    found, expected = rule.directions(stacked.bfloat16()), rule.directions(stacked.double().cpu())
    assert (found.double().cpu() - expected).norm() < 0.05 * expected.norm()
