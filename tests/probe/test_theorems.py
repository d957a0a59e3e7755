"""DeepNet's lemma and theorems on random models: what they bound stays within its bound from 6 to 48 layers and, in slow tests,
to 200, for three seeds.

Theorems 2 to 4 are about a step of SGD on the matrices of the sublayers, at initialization.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import geometric_mean

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kilolayer as kl
from kilolayer.recipes.base import Depths

VOCABULARY, SEEDS, LR = 40, (0, 1, 2), 1e-3
SHALLOW, DEEPEST = 6, 200
deep = pytest.mark.parametrize("layers", [48, pytest.param(DEEPEST, marks=pytest.mark.slow)])
"""Layers, in all: half of them on each side of a pair."""


@cache
def updates(recipe: str, layers: int, paired: bool = False) -> tuple[float, ...]:
    """||F(x, theta*) - F(x, theta)|| / ||F(x, theta)|| after a step of SGD, for each seed.

    Matrices start at Xavier's deviation, as the theorems have it, unless the recipe scales them.
    """
    return tuple(update(recipe, layers, paired, seed) for seed in SEEDS)


def update(recipe: str, layers: int, paired: bool, seed: int) -> float:
    torch.manual_seed(seed)
    source, target, labels = torch.randint(VOCABULARY, (3, 2, 8))
    shape, depths = (kl.EncoderDecoder, (layers, layers)) if paired else (kl.Encoder, (layers,))
    model = shape(VOCABULARY, 32, 2, 64, *depths, kl.recipes.get(recipe, init="xavier"), pad_id=None)
    inputs = (source, target) if paired else (source,)
    out = model(*inputs)
    F.cross_entropy(out.logits.flatten(0, 1), labels.flatten()).backward()
    before = out.states.detach()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".blocks." in name and weight.dim() == 2 and weight.grad is not None:
                weight -= LR * weight.grad
        after = model(*inputs).states
    return float((after - before).norm() / before.norm())


def growth(recipe: str, layers: int, paired: bool = False) -> float:
    """The update at this depth over that at the smallest."""
    depth = layers // 2 if paired else layers
    return geometric_mean(updates(recipe, depth, paired)) / geometric_mean(updates(recipe, SHALLOW, paired))


@deep
def test_theorem_2_an_encoders_update_does_not_depend_on_its_depth(layers: int) -> None:
    for depth in (SHALLOW, layers):
        assert geometric_mean(updates("deepnorm", depth)) == pytest.approx(4.4e-4, rel=0.25), depth
        assert max(updates("deepnorm", depth)) < 1.4 * min(updates("deepnorm", depth))


@pytest.mark.slow
@deep
def test_theorem_2_without_alpha_and_beta_it_grows(layers: int) -> None:
    assert growth("post_ln", layers) > 4
    assert min(updates("post_ln", layers)) > 50 * max(updates("deepnorm", layers))


@pytest.mark.slow
@deep
def test_theorem_3_a_pairs_update_does_not_depend_on_its_depth(layers: int) -> None:
    assert growth("deepnorm", layers, paired=True) == pytest.approx(1.0, rel=0.3)
    assert growth("post_ln", layers, paired=True) > 4


@pytest.mark.slow
@deep
def test_theorem_4_sub_ln_grows_little_more_than_not_at_all(layers: int) -> None:
    """Equation 10 promises an update that does not grow with gamma = sqrt(log 2N).

    Measured, it grows, by a factor below 4 from 6 to 200 layers, and by less than that of Pre-LN, whose gamma is 1.
    """
    assert growth("sub_ln", layers) < 4
    assert growth("pre_ln", layers) > growth("sub_ln", layers)


def bound_of_theorem_4(layers: int, scale: float) -> float:
    """Equation 10 with v = w = scale in each of the L = 2 N sublayers, for a learning rate of 1."""
    sublayers, square = 2 * layers, scale**2
    first = sublayers * 2 / (sublayers * square)
    pairs = sum(1 / ((k - 1) * square) for k in range(2, sublayers + 1))
    return first + sublayers * 2 / (sublayers * square) * pairs


def test_theorem_4_the_gains_of_the_recipe_keep_its_bound_from_growing() -> None:
    encoders = (SHALLOW, DEEPEST)
    plain = [bound_of_theorem_4(layers, 1.0) for layers in encoders]
    assert plain == pytest.approx([2 + 2 * (math.log(2 * layers) + 0.577) for layers in encoders], rel=0.02)  # O(log L)
    gains = [kl.recipes.get("sub_ln").constants("encoder", Depths(layers, 0)).gamma for layers in encoders]
    scaled = [bound_of_theorem_4(layers, gain) for layers, gain in zip(encoders, gains, strict=True)]
    assert scaled == sorted(scaled, reverse=True)


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 10.0, 1000.0])
def test_lemma_1_attention_does_not_enlarge_what_it_mixes(sharpness: float) -> None:
    """The expected norm of softmax(q) X is at most that of a row of X, and equal to it where q chooses a single row."""
    noise = torch.Generator().manual_seed(0)
    rows = torch.randn(2000, 12, 16, generator=noise)
    weights = (sharpness * torch.randn(2000, 1, 12, generator=noise)).softmax(-1)
    mixed, alone = (weights @ rows).square().sum(-1).mean(), rows.square().sum(-1).mean()
    assert float(mixed) <= 1.02 * float(alone)
    if sharpness == 0.0:
        assert float(mixed) == pytest.approx(float(alone) / 12, rel=0.05)
    if sharpness == 1000.0:
        assert float(mixed) == pytest.approx(float(alone), rel=0.05)


@pytest.mark.parametrize("size", [0.01, 1.0, 100.0])
def test_the_gradient_of_a_norm_is_bounded_by_sqrt_d_over_its_input(size: float) -> None:
    """||d LN(x) / dx|| = O(sqrt(d) / ||x||), DeepNet section 2: the larger the input of a norm, the smaller its gradient."""
    torch.manual_seed(0)
    model = kl.Encoder(VOCABULARY, 24, 2, 48, 1, "post_ln", norm_eps=1e-12, dtype=torch.float64)
    norm = model.encoder.blocks[0].self_attention.out_norm
    for _ in SEEDS:
        x = size * torch.randn(24, dtype=torch.float64)
        x = x - x.mean()
        jacobian = torch.autograd.functional.jacobian(norm, x)
        assert isinstance(jacobian, Tensor)
        assert float(torch.linalg.matrix_norm(jacobian, 2)) == pytest.approx(math.sqrt(24) / float(x.norm()), rel=1e-6)
