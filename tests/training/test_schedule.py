from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import pytest

from kilolayer.config import build, table_of
from kilolayer.errors import OptionError
from kilolayer.models.config import ModelConfig
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.tasks.translation.config import TranslationConfig, TranslationTrainConfig
from kilolayer.training.schedule import learning_rate, warmup_warning

SCHEDULES: dict[str, dict[str, Any]] = {
    "inverse_sqrt": {},
    "cosine": {"min_lr": 0.1},
    "linear": {"min_lr": 0.1},
    "warmup_stable_decay": {"min_lr": 0.1, "decay_steps": 40},
    "constant": {},
}
# The learning rate at steps 1, 10 (end of the warm-up), 55 (halfway after it), 60, 80 and 100 (the end).
EXPECTED = {
    "inverse_sqrt": [0.1, 1.0, math.sqrt(10 / 55), math.sqrt(10 / 60), math.sqrt(10 / 80), math.sqrt(10 / 100)],
    "cosine": [
        0.1,
        1.0,
        0.55,
        0.1 + 0.45 * (1 + math.cos(math.pi * 50 / 90)),
        0.1 + 0.45 * (1 + math.cos(math.pi * 70 / 90)),
        0.1,
    ],
    "linear": [0.1, 1.0, 0.55, 1 - 0.9 * 50 / 90, 1 - 0.9 * 70 / 90, 0.1],
    "warmup_stable_decay": [0.1, 1.0, 1.0, 1.0, 0.55, 0.1],
    "constant": [0.1, 1.0, 1.0, 1.0, 1.0, 1.0],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_learning_rate_at_start_warm_up_middle_and_end(schedule: Any) -> None:
    config = TrainConfig(steps=100, lr=1.0, warmup_steps=10, schedule=schedule, **SCHEDULES[schedule])
    found = [learning_rate(config, step) for step in (1, 10, 55, 60, 80, 100)]
    assert found == pytest.approx(EXPECTED[schedule], rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_warm_up_the_first_step_is_at_the_top_or_just_below(schedule: Any) -> None:
    config = TrainConfig(steps=1000, lr=1.0, warmup_steps=0, schedule=schedule, **SCHEDULES[schedule])
    first, last = learning_rate(config, 1), learning_rate(config, 1000)
    assert 0.999 <= first <= 1.0
    assert last == pytest.approx({"inverse_sqrt": 1000**-0.5, "constant": 1.0}.get(schedule, 0.1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_after_the_warm_up_it_never_rises_nor_falls_below_the_end(schedule: Any) -> None:
    config = TrainConfig(steps=100, lr=1.0, warmup_steps=10, schedule=schedule, **SCHEDULES[schedule])
    rates = [learning_rate(config, step) for step in range(10, 131)]
    assert all(a >= b for a, b in pairwise(rates))
    assert rates[-1] > config.min_lr - 1e-12
    assert all(learning_rate(config, step) == pytest.approx(step / 10) for step in range(1, 11))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"steps": 0}, "steps"),
        ({"accumulate": 0}, "accumulate"),
        ({"lr": 0.0}, "lr"),
        ({"lr": math.nan}, "lr"),
        ({"eps": 0.0}, "eps"),
        ({"seed": -1}, "seed"),
        ({"threads": -1}, "threads"),
        ({"keep": 0}, "keep"),
        ({"valid_sentences": 0}, "valid_sentences"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"clip_norm": -1.0}, "clip_norm"),
        ({"patience": -1}, "patience"),
        ({"beta2": 1.0}, "beta2"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"average": 4}, "average"),
        ({"schedule": "warmup_stable_decay"}, "decay_steps"),
        ({"schedule": "warmup_stable_decay", "decay_steps": 96_001}, "decay_steps"),
        ({"decay_steps": 5}, "decay_steps"),
        ({"min_lr": 1e-5}, "min_lr"),
        ({"schedule": "linear", "min_lr": 1.0}, "min_lr"),
        ({"schedule": "cosin"}, "cosine"),
        ({"optimizer": "adamW"}, "adamw"),
        ({"steps": 10.5}, "steps"),
        ({"valid_bleu": 1}, "valid_bleu"),
    ],
)
def test_an_option_that_cannot_be_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionError, match=named) as caught:
        TranslationTrainConfig(**options)
    assert caught.value.fix


def test_a_translator_has_both_stacks() -> None:
    with pytest.raises(OptionError, match="decoder"):
        TranslationConfig(model=ModelConfig(shape="decoder"))


def test_a_fall_at_the_end_has_the_room_that_the_warm_up_leaves() -> None:
    fall: dict[str, Any] = {"schedule": "warmup_stable_decay", "decay_steps": 900}
    assert TrainConfig(**fall, steps=1000, warmup_share=0.1).in_steps(0).warmup_steps == 100
    with pytest.raises(OptionError, match="decay_steps is 900"):
        TrainConfig(**fall, steps=1000, warmup_share=0.2)
    assert TrainConfig(**fall, epochs=2, warmup_share=0.1).in_steps(500).steps == 1000
    with pytest.raises(OptionError, match="decay_steps is 900"):
        TrainConfig(**fall, epochs=2, warmup_share=0.1).in_steps(400)


@pytest.mark.parametrize("schedule", ["inverse_sqrt", "cosine", "linear", "constant"])
def test_a_warm_up_that_the_run_does_not_outlive_is_said(schedule: Any) -> None:
    def warning(**options: Any) -> str | None:
        return warmup_warning(TrainConfig(lr=0.5, schedule=schedule, **options))

    said = warning(steps=30, warmup_steps=1000)
    assert said is not None
    assert "the warm-up of 1,000 steps is longer than the run of 30" in said
    assert "ends at 0.015 and never reaches train.lr, 0.5" in said  # 0.5 * 30 / 1000
    assert warning(steps=30, warmup_steps=29) is None
    assert warning(epochs=2.0, warmup_steps=10**6) is None  # nobody knows yet how many steps these are
    assert warning(steps=30, warmup_share=1.0) is None
    never = warning(steps=30, warmup_steps=30)
    assert never == (
        None if schedule == "constant" else f"warning: the warm-up takes all 30 steps: the {schedule} decay never starts"
    )


@pytest.mark.parametrize(
    ("options", "epoch", "warmup"),
    [
        ({"steps": 200}, 0, 80),
        ({}, 0, 4000),
        ({"epochs": 3}, 100, 120),
        ({"epochs": 3}, 100_000, 4000),
        ({"steps": 200, "warmup_steps": 4000}, 0, 4000),
        ({"steps": 200, "warmup_steps": 0}, 0, 0),
        ({"steps": 20_000, "warmup_share": 0.4}, 0, 8000),
    ],
)
def test_a_warm_up_that_is_not_given_fits_the_run(options: dict[str, Any], epoch: float, warmup: int) -> None:
    config = TrainConfig(**options)
    for same in (config, dataclasses.replace(config, seed=2), build(TrainConfig, table_of(config))):
        assert same.in_steps(epoch).warmup_steps == warmup
