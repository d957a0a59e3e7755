"""The sharpness by power iteration, beside the whole Hessian in fp64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kilolayer as kl
from kilolayer.models.model import Model
from kilolayer.probe.sharpness import adam_denominators, first_denominators, largest_eigenvalue, sharpness

EXACT = {"most": 1000, "tolerance": 1e-7}
SHAPES = {
    "encoder": lambda **options: kl.Encoder(7, 4, 2, 4, 1, dropout=0.3, **options),
    "decoder": lambda **options: kl.Decoder(7, 4, 2, 4, 1, dropout=0.3, **options),
    "sparse": lambda **options: kl.Decoder(7, 4, 2, 2, 1, moe=kl.MoE(experts=2, top_k=2, every=1), **options),
}


def small(shape: str, recipe: str = "deepnorm") -> tuple[Model, partial[Tensor]]:
    model = SHAPES[shape](recipe=recipe).double()
    tokens, labels = torch.randint(1, 7, (2, 2, 5))
    tokens[1, 3:] = 0
    return model, partial(loss_of, tokens=tokens, labels=labels.masked_fill(tokens == 0, 0))


def loss_of(model: Model, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten(), ignore_index=0)


def whole_hessian(model: Model, loss: partial[Tensor]) -> Tensor:
    """By differences of the gradient, column by column; [parameters, parameters], symmetric up to rounding."""
    model.eval()
    parameters = list(model.parameters())

    def gradient() -> Tensor:
        found = torch.autograd.grad(loss(model), parameters, allow_unused=True)
        return torch.cat([torch.zeros(p.numel()) if g is None else g.flatten() for g, p in zip(found, parameters, strict=True)])

    columns, tiny = [], 1e-5
    for parameter in parameters:
        flat = parameter.data.view(-1)
        for index in range(len(flat)):
            start = float(flat[index])
            sides = []
            for sign in (1, -1):
                flat[index] = start + sign * tiny
                sides.append(gradient())
            flat[index] = start
            columns.append((sides[0] - sides[1]) / (2 * tiny))
    model.train()
    return torch.stack(columns)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["decoder", "sparse", "encoder"])
def test_it_is_the_largest_eigenvalue_of_the_whole_hessian(shape: str) -> None:
    model, loss = small(shape)
    expected = torch.linalg.eigvalsh(whole_hessian(model, loss))[-1]
    found = sharpness(model, loss, **EXACT)
    assert found.value == pytest.approx(float(expected), rel=1e-3)
    assert found.residual < 0.05


@pytest.mark.slow
def test_it_is_the_largest_eigenvalue_of_the_preconditioned_hessian() -> None:
    model, loss = small("decoder")
    denominators = first_denominators(model, loss, eps=1e-3)
    flat = torch.cat([each.flatten() for each in denominators])
    expected = torch.linalg.eigvals(whole_hessian(model, loss) / flat[:, None]).real.max()
    found = sharpness(model, loss, denominators=denominators, **EXACT)
    assert found.value == pytest.approx(float(expected), rel=1e-3)


def test_a_negative_eigenvalue_that_is_larger_in_size_is_passed_over() -> None:
    for values in ([-9.0, 4.0, 1.0], [-4.001, 4.0, 1.0], [-3.0, -2.0, -1.0], [5.0, -4.9, 0.0]):
        basis = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
        matrix = basis @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ basis.T
        start = [torch.nn.functional.normalize(torch.randn(3, dtype=torch.float64), dim=0)]
        found = largest_eigenvalue(lambda vector, matrix=matrix: [matrix @ vector[0]], start, most=4000, tolerance=1e-10)
        assert found.value == pytest.approx(max(values), rel=1e-4), values


def test_dropout_is_off_and_the_model_stays_as_it_was() -> None:
    model, loss = small("encoder")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    first, second = (sharpness(model, loss, most=10, seed=3) for _ in range(2))
    assert first == second
    assert torch.equal(random, torch.get_rng_state())
    assert model.training
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_the_first_denominators_are_those_of_torchs_adam() -> None:
    model, loss = small("decoder")
    model.eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-6)
    expected = first_denominators(model, loss, eps=1e-6)
    loss(model).backward()
    optimizer.step()
    squares = [optimizer.state[parameter]["exp_avg_sq"] for parameter in model.parameters()]
    for found, wanted in zip(adam_denominators(squares, 1, beta2=0.98, eps=1e-6), expected, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-9, atol=0)


def test_a_loss_that_is_not_finite_has_no_sharpness() -> None:
    model, loss = small("encoder")
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    found = sharpness(model, loss)
    assert found.value != found.value
    assert found.products == 1
