"""The loss around a model's weights, beside closed forms and loops written out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kilolayer as kl
from kilolayer.errors import InputError
from kilolayer.models.model import Model
from kilolayer.probe.surface import filters, grid, loss_surface, random_direction

MODELS = {
    "translator": lambda **more: kl.EncoderDecoder(11, 8, 2, 16, 2, 1, positions="t5", **more),
    "sub_ln": lambda **more: kl.Decoder(11, 8, 2, 16, 2, recipe="sub_ln", moe=kl.MoE(experts=4, top_k=2, every=1), **more),
    "dlcl": lambda **more: kl.Encoder(11, 8, 2, 16, 3, recipe="dlcl", positions="learned", max_length=9, **more),
    "normformer": lambda **more: kl.Decoder(11, 8, 2, 16, 2, recipe="normformer", tie_embeddings=False, **more),
}
TWO = [f"decoder.blocks.0.feedforward.f.{name}.weight" for name in ("input", "output")]


def quadratic(model: Model) -> Tensor:
    """||W - 1||^2 + 3 <W, V> of two matrices of the first layer."""
    wide, narrow = (model.get_parameter(name).double() for name in TWO)
    return (wide - 1).square().sum() + 3 * (wide * narrow.T).sum()


@pytest.mark.parametrize("name", MODELS)
def test_each_filter_of_a_direction_is_as_long_as_the_models_own(name: str) -> None:
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter))
        next(iter(filters(model).values()))[3] = 0.0
    direction = random_direction(model, seed=5)
    for parameter, part in direction.items():
        weight = model.get_parameter(parameter).detach()
        for row, own in zip(part.reshape(-1, part.shape[-1]), weight.reshape(-1, weight.shape[-1]), strict=True):
            length = math.sqrt(sum(float(each) ** 2 for each in row))
            assert length == pytest.approx(math.sqrt(sum(float(each) ** 2 for each in own)), rel=1e-5)


def test_a_filter_of_a_convolution_is_what_gives_one_channel() -> None:
    sizes: dict[str, Any] = {"image": kl.ImageInput(size=8, patch=4), "dim": 16, "heads": 2, "ffn_dim": 24, "layers": 4}
    model = kl.ImageEncoder(**sizes, map_head=kl.MapHead(classes=3))
    direction = random_direction(model, seed=5)
    for name in ("map_head.output.weight", "map_head.top.0.weight"):
        weight = model.get_parameter(name).detach()
        for drawn, own in zip(direction[name], weight, strict=True):
            assert float(drawn.norm()) == pytest.approx(float(own.norm()), rel=1e-5)
            assert drawn.flatten().abs().unique().numel() == own.numel() > 1
            assert not torch.allclose(drawn.abs(), own.abs())


@pytest.mark.parametrize("name", MODELS)
def test_biases_norms_and_scales_do_not_move(name: str) -> None:
    model = MODELS[name]()
    still = dict(model.named_parameters()).keys() - random_direction(model, seed=0).keys()
    moved = {parameter.rpartition(".")[0].rpartition(".")[2] for parameter in random_direction(model, seed=0)}
    matrices = {"input", "output", "query_key_value", "query", "key_value", "embedding", "vocabulary", "router", "at_input"}
    assert moved <= matrices
    assert all(not parameter.endswith("bias") for parameter in random_direction(model, seed=0))
    words = ("norm", "bias", "scale", "skip", "branch", "stream.weight", "log_temperature")
    assert all(any(word in parameter for word in words) for parameter in still), still


def test_a_seed_gives_the_same_direction_and_another_one_another() -> None:
    model = MODELS["normformer"]()
    random = torch.get_rng_state()
    one, again, other = (random_direction(model, seed) for seed in (1, 1, 2))
    assert torch.equal(random, torch.get_rng_state())
    for name, part in one.items():
        assert torch.equal(part, again[name])
        assert not torch.equal(part, other[name])
        size = part.norm() * other[name].norm()
        assert float((part * other[name]).sum().abs() / size) < 0.6


def test_a_quadratic_loss_has_the_surface_that_its_formula_says() -> None:
    model = MODELS["normformer"]()
    first, second = random_direction(model, 0), random_direction(model, 1)
    x, y = grid(5, 0.8), grid(3, 2.0)
    found = loss_surface(model, quadratic, (first, second), x, y)
    w, v = (model.get_parameter(name).detach().double().numpy() for name in TWO)
    (a, c), (b, d) = ([direction[name].double().numpy() for direction in (first, second)] for name in TWO)
    for row, up in enumerate(y):
        for column, right in enumerate(x):
            wide, narrow = w + right * a + up * c, v + right * b + up * d
            expected = ((wide - 1) ** 2).sum() + 3 * (wide * narrow.T).sum()
            assert found.loss[row, column] == pytest.approx(expected, rel=1e-6)
    assert found.centre == quadratic(model).item()


def test_one_direction_gives_a_line() -> None:
    model = MODELS["normformer"]()
    direction = random_direction(model, 0)
    line = loss_surface(model, quadratic, [direction], grid(5, 1.0))
    plane = loss_surface(model, quadratic, [direction, random_direction(model, 1)], grid(5, 1.0), grid(3, 1.0))
    assert line.loss.shape == (1, 5)
    assert np.array_equal(line.loss[0], plane.loss[1])
    with pytest.raises(InputError, match="1 directions"):
        loss_surface(model, quadratic, [direction], grid(5, 1.0), grid(3, 1.0))


def test_the_model_stays_as_it_was_also_where_the_loss_fails() -> None:
    model = MODELS["translator"](dropout=0.5)
    source, target, labels = torch.randint(1, 11, (3, 2, 6))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen: list[float] = []

    def loss(moved: Model) -> Tensor:
        assert not moved.training
        seen.append(float(F.cross_entropy(moved(source, target).logits.flatten(0, 1), labels.flatten())))
        if len(seen) == 7:
            raise KeyboardInterrupt
        return torch.tensor(seen[-1])

    directions = [random_direction(model, seed) for seed in (0, 1)]
    with pytest.raises(KeyboardInterrupt):
        loss_surface(model, loss, directions, grid(5, 1.0), grid(5, 1.0))
    assert len(set(seen)) == 7
    found = loss_surface(model, loss, directions, grid(3, 1.0), grid(3, 1.0))
    assert found.centre == seen[7 + 4]
    assert all(module.training for module in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_where_the_loss_is_not_finite_the_surface_says_so() -> None:
    model = MODELS["normformer"]()
    name = TWO[0]
    direction = {name: torch.full_like(model.get_parameter(name), math.inf)}
    found = loss_surface(model, quadratic, [direction], grid(3, 1.0))
    assert not np.isfinite(found.loss[0, [0, 2]]).any()
    assert np.isfinite(found.centre)


def test_a_direction_of_another_model_is_refused() -> None:
    model, wider = MODELS["normformer"](), kl.Decoder(11, 16, 2, 16, 2, recipe="normformer", tie_embeddings=False)
    with pytest.raises(InputError, match="the direction has"):
        loss_surface(model, quadratic, [random_direction(wider, 0)], grid(3, 1.0))
    with pytest.raises(InputError, match="no parameter"):
        loss_surface(model, quadratic, [{"nothing": torch.zeros(2, 2)}], grid(3, 1.0))


def test_a_grid_of_an_odd_size_has_its_centre_at_0() -> None:
    for size, span in ((21, 1.0), (7, 0.3), (3, 1e-3), (1, 2.0)):
        steps = grid(size, span)
        assert len(steps) == size
        assert steps[size // 2] == 0.0
        assert steps[-1] == (span if size > 1 else 0.0) == -steps[0]
