"""The kernels of the update against the rules, which are tested against torch's optimizers."""

from __future__ import annotations

import copy
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn

from kilolayer.optimizers import weight_factors
from kilolayer.optimizers.optimizer import make_optimizer
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
