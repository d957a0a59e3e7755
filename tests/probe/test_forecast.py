"""The forecast: what it reads off a rising learning rate, and what it says of small configurations."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import SMALL, table, write_corpus

import kilolayer as kl
from kilolayer.cli.main import main
from kilolayer.config import build, dump
from kilolayer.errors import InputError, OptionError
from kilolayer.probe import forecast as forecasts
from kilolayer.probe.forecast import POWER, STEPS, RangeTest, forecast, judge
from kilolayer.probe.range_test import fading_rate, smoothed, sweep_rates, turning_rate
from kilolayer.probe.trial import Measured, Trial
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.loop import train
from kilolayer.training.metrics import read_metrics
from kilolayer.training.run import Run, cache_folder, prepare
from kilolayer.training.schedule import learning_rate

RATES = [1e-4 * 2**step for step in range(12)]


def test_the_loss_turns_where_its_smoothed_curve_is_lowest() -> None:
    losses = [(index - 7) ** 2 for index in range(12)]
    means = [
        sum(0.3 * 0.7 ** (last - at) * losses[at] for at in range(last + 1)) / (1 - 0.7 ** (last + 1)) for last in range(12)
    ]
    assert smoothed(losses) == pytest.approx(means)
    assert turning_rate(RATES, losses) == RATES[min(range(12), key=means.__getitem__)]
    assert turning_rate(RATES[:3], [3.0, 2.0, math.nan]) == RATES[1]


def test_a_stack_fades_where_its_share_has_fallen_from_its_largest() -> None:
    falling = [0.8] * 6 + [0.8 * 1e-3] * 6
    # The logarithm falls by 6.9; of this the mean has 0.3 / (1 - 0.7^7) = 0.33 at once, then 0.54, 0.68: 0.10, 0.024, 0.009.
    assert fading_rate(RATES, falling, 0.2) == RATES[6]
    assert fading_rate(RATES, falling, 0.05) == RATES[7]
    assert fading_rate(RATES, falling, 0.01) == RATES[8]
    assert fading_rate(RATES, [0.5] * 12, 0.5) is None
    assert fading_rate(RATES, [0.0, 0.0, *[0.1 * 1.1**step for step in range(10)]], 0.5) is None


def test_what_reaches_the_first_layers_is_that_of_the_weakest_stack() -> None:
    step = Measured(1e-3, 2.0, 5.0, {"encoder": (1.0, 2.0, 4.0), "decoder": (3.0, 3.0)})
    assert step.reached == pytest.approx(1 / 4)
    deep = Measured(1e-3, 2.0, 5.0, {"decoder": (1.0, 3.0, *[8.0] * 18)})
    assert deep.reached == pytest.approx((1 + 3) / 2 / 8)
    assert Measured(1e-3, math.nan, 5.0, {"encoder": (1.0,)}).reached == 0


def ramp(reached: list[float], losses: list[float]) -> RangeTest:
    steps = zip(RATES, losses, reached, strict=True)
    return RangeTest.of([Measured(lr, loss, 1.0, {"decoder": (first, 1.0)}) for lr, loss, first in steps])


def test_a_fading_stack_lowers_the_rate_and_lengthens_the_warm_up() -> None:
    losses = [5.0 - 0.1 * step for step in range(12)]
    config = TrainConfig(lr=2e-3, warmup_steps=100, steps=10_000)
    lasting, fading = (judge(ramp(reached, losses), config, RATES, None) for reached in ([0.5] * 12, [0.5] * 4 + [1e-6] * 8))
    assert lasting.largest_lr is not None
    assert fading.largest_lr is not None
    assert fading.largest_lr < lasting.largest_lr
    assert fading.shortest_warmup is not None
    assert lasting.shortest_warmup is not None
    assert fading.shortest_warmup > lasting.shortest_warmup
    assert "first layers" in fading.why


@pytest.mark.parametrize("broken", ["nll", "gradient"])
def test_a_step_that_is_not_finite_is_no_faded_stack(broken: str) -> None:
    good = [Measured(lr, 5.0, 1.0, {"decoder": (0.5, 1.0)}) for lr in RATES[:6]]
    ended = replace(good[0], lr=RATES[6], **{broken: math.inf})
    assert RangeTest.of([*good, ended]).faded is None
    fading = [replace(step, stacks={"decoder": (0.5 if place < 2 else 1e-9, 1.0)}) for place, step in enumerate(good)]
    assert RangeTest.of([*fading, ended]).faded == RangeTest.of(fading).faded is not None


def test_a_longer_warm_up_allows_a_larger_rate_by_a_power() -> None:
    losses = [5.0 - 0.1 * step for step in range(12)]
    test = ramp([0.5] * 4 + [1e-6] * 8, losses)
    assert test.limit(400) / test.limit(100) == pytest.approx(4**POWER)
    assert test.limit(10**9) == ramp([0.5] * 12, losses).limit(0)
    long = judge(test, TrainConfig(lr=900.0, warmup_steps=0, steps=100), RATES, None)
    assert long.shortest_warmup is None
    assert not long.lives


def test_the_answers_agree_with_whether_the_configuration_lives() -> None:
    test = ramp([0.5] * 4 + [1e-6] * 8, [5.0 - 0.1 * step for step in range(12)])
    limit = test.limit(150)  # the usual candidates have no warm-up between 100 and 200 steps
    lives = judge(test, TrainConfig(lr=limit, warmup_steps=150, steps=1000))
    assert lives.lives
    assert (lives.largest_lr, lives.shortest_warmup) == (limit, 150)
    dies = judge(test, TrainConfig(lr=1.001 * limit, warmup_steps=150, steps=1000))
    assert not dies.lives
    assert dies.largest_lr is not None
    assert dies.largest_lr < limit
    assert dies.shortest_warmup == 200
    assert judge(test, TrainConfig(lr=limit, warmup_steps=150, steps=150)).shortest_warmup == 150


def test_the_usual_rates_are_those_that_a_user_would_type() -> None:
    assert {0.00015, 0.0003, 0.6} < set(forecasts.RATES)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def small(corpus: Path) -> RunConfig:
    return build(RunConfig, table(corpus, train={"steps": 60, "warmup_steps": 20}))


def test_a_trial_takes_the_very_steps_of_the_run(small: RunConfig, tmp_path: Path) -> None:
    task = prepare(small, cache_folder())
    config = task.resolve(replace(small, train=replace(small.train, steps=6)))
    run = Run.create(tmp_path / "run", config, task.vocabulary)
    assert train(run, task) == 0
    losses = [row["nll"] for row in read_metrics(run.folder) if row["kind"] == "train"]
    trial = Trial(config, task)
    assert [trial.step(learning_rate(config.train, step)).nll for step in range(1, 7)] == losses


def test_it_measures_the_gradient_that_autograd_gives(small: RunConfig) -> None:
    config = replace(small, model=replace(small.model, dropout=0.0))
    task = prepare(config, cache_folder())
    trial = Trial(task.resolve(config), task)
    model, batch = trial.trainer.model, next(task.training_batches(config.train.seed))
    loss = task.loss(model, batch.parts, hidden_states=False)
    names, weights = zip(*model.named_parameters(), strict=True)
    gradients = dict(zip(names, torch.autograd.grad(loss.total / loss.count, weights), strict=True))
    found = trial.step(1e-3, layers=True)
    for side in ("encoder", "decoder"):
        for layer, norm in enumerate(found.stacks[side]):
            own = [each.flatten() for name, each in gradients.items() if name.startswith(f"{side}.blocks.{layer}.")]
            assert norm == pytest.approx(float(torch.cat(own).norm()), rel=1e-4)


def test_an_absurd_rate_is_told_to_die_and_a_small_one_to_live(small: RunConfig) -> None:
    task = prepare(small, cache_folder())
    config = task.resolve(small)
    steps = sweep_rates(Trial(config, task), STEPS)
    assert steps[-1].lr == pytest.approx(1.0)
    test = RangeTest.of(steps)
    assert judge(test, replace(config.train, lr=1e-4), RATES, None).lives
    absurd = judge(test, replace(config.train, lr=30.0), RATES, None)
    assert not absurd.lives
    assert absurd.shortest_warmup is None


def test_a_configuration_in_fp16_is_forecast_by_steps_in_fp32(small: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kilolayer.probe.forecast.STEPS", 3)
    task = prepare(small, cache_folder())
    precise, half = (
        forecast(task.resolve(replace(small, train=replace(small.train, precision=precision))), task).measured.steps
        for precision in ("fp32", "fp16")
    )
    assert half == precise


@pytest.mark.matrix(2)
@pytest.mark.parametrize("task", sorted(SMALL))
def test_every_task_is_forecast_by_command(
    task: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kilolayer.probe.forecast.STEPS", 8)
    path = tmp_path / "small.toml"
    path.write_text(dump(SMALL[task](corpus, model={"moe": {"experts": 2, "every": 1}})))
    assert main(["forecast", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["steps"]) == 8
    assert found["largest_lr"] > 0
    assert main(["forecast", str(path), "--train.lr", "500"]) == 0
    assert "is likely to fail" in capsys.readouterr().out
    assert {each.name for each in tmp_path.iterdir()} == {"small.toml"}


def test_python_takes_a_file_and_the_values_to_choose_from(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kilolayer.probe.forecast.STEPS", 8)
    path = tmp_path / "small.toml"
    path.write_text(dump(table(corpus)))
    with pytest.raises(InputError, match="config is None, not a path"):
        kl.forecast(None)  # pyright: ignore[reportArgumentType]
    for wrong in ("fast", 3, [-1.0], [math.nan]):
        with pytest.raises(OptionError, match="rates has a value that is not a number, or below 0"):
            kl.forecast(path, rates=wrong)  # pyright: ignore[reportArgumentType]
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    path.write_text(dump(table(corpus, train={"threads": threads + 1})))
    found = kl.forecast(path, rates=[1e-6, 1e-5, 1e3], warmups=[2, 5])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert found.largest_lr == 1e-5
    assert found.shortest_warmup in (2, 5, None)
    with pytest.raises(OptionError, match="below 0"):
        forecast(path, warmups=[-1])
