"""Sampling: what may be drawn, how often, and from which random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kilolayer.generate.config import SearchConfig
from kilolayer.generate.sample import draw, uniforms
from kilolayer.generate.search import generate
from tests.generate.small_translators import BOS, EOS, PAD, next_log_probabilities, sources, translator

DRAWS = 6000
# The 99.9th percentiles of chi-square with 1 to 11 degrees of freedom.
CHI_SQUARE = [10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32, 26.12, 27.88, 29.59, 31.26]


def first_tokens(**options: Any) -> tuple[Tensor, Tensor]:
    """How often each token of 12 was drawn first, and the model's log-probabilities of it."""
    model, source = translator(sharpness=1.0), sources([4])
    config = SearchConfig(method="sample", n_best=DRAWS, max_length_factor=0.0, max_length_extra=1, **options)
    (hypotheses,) = generate(model, source, config)
    drawn = torch.tensor([each.tokens[0] if each.tokens else EOS for each in hypotheses])
    return drawn.bincount(minlength=12), next_log_probabilities(model, source[0], [[]])[0]


def assert_frequencies(counts: Tensor, probabilities: Tensor) -> None:
    possible = probabilities > 0
    assert not counts[~possible].any()
    expected = probabilities[possible] * counts.sum()
    assert (expected > 5).all()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum().item()
    assert statistic < CHI_SQUARE[int(possible.sum()) - 2]


@pytest.mark.parametrize("temperature", [None, 0.7, 3.0])
def test_frequencies_are_the_softmax(temperature: float | None) -> None:
    counts, log_probabilities = first_tokens(temperature=temperature)
    assert_frequencies(counts, (log_probabilities / (temperature or 1.0)).softmax(0))


@pytest.mark.parametrize("top_k", [2, 5, 100])
def test_top_k_draws_from_the_k_most_probable(top_k: int) -> None:
    counts, log_probabilities = first_tokens(top_k=top_k)
    kept = log_probabilities.argsort(descending=True)[:top_k]
    expected = torch.zeros(12, dtype=torch.float64)
    expected[kept] = log_probabilities[kept].softmax(0)
    assert_frequencies(counts, expected)


@pytest.mark.parametrize("top_p", [0.4, 0.75, 1.0])
def test_top_p_draws_from_the_fewest_that_have_p_together(top_p: float) -> None:
    counts, log_probabilities = first_tokens(top_p=top_p)
    probabilities = log_probabilities.softmax(0)
    kept, mass = [], 0.0
    for token in probabilities.argsort(descending=True).tolist():
        if mass < top_p and probabilities[token] > 0:
            kept.append(token)
            mass += probabilities[token].item()
    expected = torch.zeros(12, dtype=torch.float64)
    expected[kept] = probabilities[kept] / mass
    assert_frequencies(counts, expected)


def test_top_1_and_tiny_top_p_and_tiny_temperature_are_greedy() -> None:
    model, source = translator(), sources([5, 2, 4])
    greedy = [each.tokens for (each,) in generate(model, source, SearchConfig(method="greedy"))]
    for options in ({"top_k": 1}, {"top_p": 1e-12}, {"temperature": 1e-9}, {"temperature": 5e-324}):
        found = generate(model, source, SearchConfig(method="sample", **options))
        assert [each.tokens for (each,) in found] == greedy


def test_a_token_of_probability_0_is_never_drawn() -> None:
    log_probabilities = torch.tensor([float("-inf"), 0.0, float("-inf"), -1.0, float("-inf")]).expand(3, -1)
    ends = torch.tensor([0.0, 1 - 2**-53, 0.999999], dtype=torch.float64)
    assert draw(log_probabilities, ends, temperature=1.0, top_k=None, top_p=None).tolist() == [1, 3, 3]
    assert draw(log_probabilities, ends, temperature=1.0, top_k=4, top_p=None).tolist() == [1, 3, 3]
    assert draw(log_probabilities, ends, temperature=1.0, top_k=4, top_p=0.5).tolist() == [1, 1, 1]


def test_equal_scores_leave_top_k_exactly_k() -> None:
    tokens = draw(torch.zeros(500, 9), torch.linspace(0, 0.999, 500, dtype=torch.float64), temperature=1.0, top_k=3, top_p=None)
    assert set(tokens.tolist()) == {0, 1, 2}


def test_the_seed_and_the_index_fix_what_is_drawn() -> None:
    model, source = translator(sharpness=0.5), sources([4, 4, 4]) * 0 + sources([4])
    config = SearchConfig(method="sample", seed=5)
    first = generate(model, source, config)
    assert first == generate(model, source, config)
    assert first != generate(model, source, SearchConfig(method="sample", seed=6))
    assert len({tuple(each.tokens) for (each,) in first}) > 1
    swapped = generate(model, source, config, indices=[2, 0, 1])
    assert [swapped[1], swapped[2], swapped[0]] == first


def test_longer_or_more_draws_begin_with_the_same() -> None:
    assert torch.equal(uniforms(3, [8, 9], 2, 5), uniforms(3, [8, 9], 2, 11)[..., :5])
    assert not torch.equal(uniforms(3, [8], 2, 5), uniforms(3, [9], 2, 5))


def test_samples_of_a_sentence_are_independent_and_in_the_order_drawn() -> None:
    model, source = translator(sharpness=0.5), sources([4, 3])
    found = generate(model, source, SearchConfig(method="sample", n_best=6, seed=1))
    for hypotheses in found:
        assert len({tuple(each.tokens) for each in hypotheses}) > 3
        assert [each.score for each in hypotheses] != sorted((each.score for each in hypotheses), reverse=True)
        assert not any({PAD, BOS, EOS} & set(each.tokens) for each in hypotheses)
