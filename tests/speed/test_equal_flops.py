"""Steps and widths of equal cost, beside a count of FLOPs and a search through all widths."""

from __future__ import annotations

from dataclasses import replace

import pytest

import kilolayer as kl
from kilolayer.errors import InputError
from kilolayer.speed.budget import Work
from kilolayer.speed.equal_flops import steps_of_equal_flops, training_flops, width_of_equal_flops

WORK = Work(batch=4, length=10)
WIDE = kl.ModelConfig(layers=1, dim=64, heads=4, ffn_dim=256, vocab_size=100)
DEEP = replace(WIDE, layers=3, dim=32, ffn_dim=128)


def by_hand(config: kl.ModelConfig) -> float:
    """Two FLOPs a multiplication, three products a matrix, of an encoder-decoder on 4 x 10 tokens a side."""
    dim, layers, length = config.dim, config.layers or 0, WORK.length
    matrices = layers * (4 + 8) * dim**2 + 2 * layers * 2 * dim * config.ffn_dim + dim * 100
    attended = layers * 3 * 2 * length * dim
    return 3 * 2 * (matrices + attended) * WORK.batch * length


@pytest.mark.parametrize("config", [WIDE, DEEP])
def test_a_step_costs_what_its_products_cost(config: kl.ModelConfig) -> None:
    assert training_flops(config, WORK) == pytest.approx(by_hand(config), rel=0.03)  # a causal mask saves a few
    assert training_flops(config, WORK, 7) == pytest.approx(7 * training_flops(config, WORK))


def test_as_many_steps_cost_the_same() -> None:
    steps = steps_of_equal_flops(DEEP, WIDE, WORK, 10_000)
    assert training_flops(DEEP, WORK, steps) == pytest.approx(training_flops(WIDE, WORK, 10_000), rel=1e-3)
    assert steps_of_equal_flops(WIDE, WIDE, WORK, 123) == 123
    assert steps_of_equal_flops(replace(WIDE, dim=256, ffn_dim=1024), DEEP, WORK, 1) == 1


def test_the_width_is_the_nearest_of_all() -> None:
    wanted = training_flops(WIDE, WORK)
    widths = [replace(DEEP, dim=8 * units, ffn_dim=32 * units) for units in range(2, 9)]
    nearest = min(widths, key=lambda each: abs(training_flops(each, WORK) - wanted))
    assert width_of_equal_flops(DEEP, WIDE, WORK) == nearest
    assert nearest.dim < WIDE.dim
    assert width_of_equal_flops(DEEP, DEEP, WORK) == DEEP
    assert width_of_equal_flops(WIDE, DEEP, WORK).dim > DEEP.dim


def test_a_model_that_is_too_dear_in_every_width_is_refused() -> None:
    with pytest.raises(InputError, match="smallest width"):
        width_of_equal_flops(replace(DEEP, layers=12, dim=64), replace(WIDE, dim=8, ffn_dim=8, layers=1), WORK)
