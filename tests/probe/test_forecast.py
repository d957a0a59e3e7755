"""The forecast: what it reads off a rising learning rate, and what it says of small configurations."""

from __future__ import annotations

import json
import math
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.cli.main import main
from kilolayer.config import build, dump
from kilolayer.errors import InputError, OptionError
from kilolayer.probe import forecast as forecasts
from kilolayer.probe.critical_rate import QUIET, SETTLING, critical_rate
from kilolayer.probe.forecast import STEPS, RangeTest, forecast, judge, smoothed, sweep_rates
from kilolayer.probe.subject import starting_model
from kilolayer.probe.trial import Measured, Trial
from kilolayer.runs.metrics import read_metrics
from kilolayer.runs.run import Run, cache_folder, prepare
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.loop import train
from kilolayer.training.schedule import learning_rate
from tests.fixtures.small_runs import LAYERED, SMALL, table

ROOT = Path(__file__).parents[2]
RATES = [1e-4 * 2**step for step in range(12)]


def test_the_smoothed_curve_is_a_weighted_mean_of_the_past() -> None:
    losses = [(index - 7) ** 2 for index in range(12)]
    means = [
        sum(0.3 * 0.7 ** (last - at) * losses[at] for at in range(last + 1)) / (1 - 0.7 ** (last + 1)) for last in range(12)
    ]
    assert smoothed(losses) == pytest.approx(means)
    assert smoothed([1.0, math.nan, 1.0])[1:] == [math.inf, math.inf]


def test_what_reaches_the_first_layers_is_that_of_the_weakest_stack() -> None:
    step = Measured(1e-3, 2.0, 5.0, {"encoder": (1.0, 2.0, 4.0), "decoder": (3.0, 3.0)})
    assert step.reached == pytest.approx(1 / 4)
    deep = Measured(1e-3, 2.0, 5.0, {"decoder": (1.0, 3.0, *[8.0] * 18)})
    assert deep.reached == pytest.approx((1 + 3) / 2 / 8)
    assert Measured(1e-3, math.nan, 5.0, {"encoder": (1.0,)}).reached == 0


def ramp(reached: list[float], losses: list[float], critical: float = 0.1) -> RangeTest:
    steps = zip(RATES, losses, reached, strict=True)
    return RangeTest(tuple(Measured(lr, loss, 1.0, {"decoder": (first, 1.0)}) for lr, loss, first in steps), critical)


FALLING = [5.0 - 0.1 * step for step in range(12)]


def test_what_was_lost_and_how_far_the_loss_rose_are_those_up_to_a_rate() -> None:
    test = ramp([0.5] * 6 + [0.5e-3] * 6, [5.0] * 3 + [4.0] * 3 + [6.0] * 6)
    # The logarithm falls by 6.9; of this the mean has 0.3 / (1 - 0.7^7) = 0.33 at once, then 0.54, 0.68.
    share = [0.3 / (1 - 0.7**7), 0.51 / (1 - 0.7**8), 0.657 / (1 - 0.7**9)]
    assert test.lost(RATES[5]) == pytest.approx(0, abs=1e-9)
    assert [test.lost(lr) for lr in RATES[6:9]] == pytest.approx([math.log(1e3) * each for each in share])
    means = smoothed([5.0] * 3 + [4.0] * 3 + [6.0] * 6)
    assert test.risen(RATES[5]) == 0
    assert test.risen(RATES[8]) == pytest.approx(means[8] - means[5])
    assert test.risen(RATES[0] / 2) == test.lost(RATES[0] / 2) == 0
    rising = ramp([0.0, 0.0, *[0.1 * 1.1**step for step in range(10)]], FALLING)
    assert rising.lost(1.0) == pytest.approx(0, abs=1e-9)  # a share that begins near 0, as with branches that start at 0


def test_the_odds_are_those_of_the_fitted_weights() -> None:
    test = ramp([0.5] * 6 + [0.5e-3] * 6, FALLING, critical=0.02)
    lr, warmup = RATES[8], 0.1
    lost = math.log(1e3) * 0.657 / (1 - 0.7**9)
    odds = 1.42 * lost + 0.278 * math.log(lr / 0.02) - 0.296 * math.log(0.1) - 4.19
    assert test.breaks(lr, warmup) == pytest.approx(1 / (1 + math.exp(-odds)))


def test_a_larger_rate_never_helps_and_a_longer_warm_up_never_harms() -> None:
    test = ramp([0.5, 0.4, 0.5, 0.1, 1e-3, 0.3, 1e-5, *[0.2] * 5], [5, 4, 6, 4, 3, 8, 3, 3, 3, 9, 3, 3])
    chances = [test.breaks(lr, 0.1) for lr in RATES]
    assert chances == sorted(chances)
    assert test.breaks(1e-2, 0.4) < test.breaks(1e-2, 0.01)
    assert test.breaks(RATES[-1] * 1.01, 0.4) == 1  # no step was taken there


def test_a_fading_stack_lowers_the_rate() -> None:
    config = TrainConfig(lr=2e-3, warmup_steps=100, steps=10_000)
    lasting, fading = (judge(ramp(reached, FALLING), config, RATES, None) for reached in ([0.5] * 12, [0.5] * 4 + [1e-6] * 8))
    assert lasting.largest_lr is not None
    assert fading.largest_lr is not None
    assert fading.largest_lr < lasting.largest_lr
    assert fading.breaks > lasting.breaks
    assert "the gradient reached the first layers" in lasting.why
    assert "of their share of the gradient" in judge(ramp([0.5] * 4 + [1e-6] * 8, FALLING), replace(config, lr=0.1)).why


def test_the_answers_agree_with_whether_the_configuration_lives() -> None:
    test = ramp([0.5] * 4 + [1e-6] * 8, FALLING)
    for lr in (1e-4, 5e-4, 1e-3, 1.7e-3, 5e-3, 0.1):
        found = judge(test, TrainConfig(lr=lr, warmup_steps=150, steps=1000))
        assert found.lives == (found.breaks <= 0.5) == (found.largest_lr is not None and found.largest_lr >= lr)
        assert found.lives == (found.shortest_warmup is not None and found.shortest_warmup <= 150)
    assert judge(test, TrainConfig(lr=900.0, warmup_steps=0, steps=100)).shortest_warmup is None


def test_the_weights_are_those_that_the_runs_give() -> None:
    fitted = runpy.run_path(str(ROOT / "benchmarks/forecast/fit.py"))
    kept = json.loads((ROOT / "benchmarks/forecast/results.json").read_text())
    runs = fitted["examples"](kept["series"])
    weights = [forecasts.LOST, forecasts.RISEN, forecasts.CRITICAL, forecasts.WARMUP, forecasts.CONSTANT]
    assert fitted["fit"](runs, fitted["of_forecast"]).tolist() == pytest.approx(weights, rel=0.01)
    right, brier = fitted["scores"](runs, fitted["held_out"](runs, fitted["of_forecast"]))
    assert (right, len(runs), round(brier, 3)) == (forecasts.RIGHT, forecasts.OF, forecasts.BRIER)


def test_the_critical_rate_is_where_the_loss_of_its_batch_begins_to_rise(small: RunConfig) -> None:
    task = prepare(small, cache_folder())
    config = task.resolve(replace(small, model=replace(small.model, dropout=0.0)))
    found = critical_rate(Trial(config, task), task)
    assert 1e-3 < found < 100
    trial = Trial(config, task)
    for _ in range(SETTLING):
        trial.step(QUIET)
    batch = next(trial.trainer.batches)
    before = {name: weight.detach().clone() for name, weight in trial.model.named_parameters()}

    def loss_after(rate: float) -> float:
        """The update by torch's own Adam, whose moments are those of the trial, and whose next gradient is their mean."""
        state = trial.trainer.optimizer.tensors()
        taken = int(trial.trainer.optimizer.taken)
        with torch.no_grad():
            for name, weight in trial.model.named_parameters():
                mean = state[f"{name}/mean"] / (1 - config.train.beta1**taken)
                square = state[f"{name}/square"] / (1 - config.train.beta2**taken)
                weight.copy_(torch.addcdiv(before[name], mean, square.sqrt() + config.train.eps, value=-rate))
            measured = task.loss(trial.model.eval(), batch.parts, hidden_states=False)
        return float(measured.total / measured.count)

    start = loss_after(0.0)
    assert loss_after(found) > start >= loss_after(found / 1.2)


def test_weights_of_less_precision_are_put_back_to_the_bit(small: RunConfig) -> None:
    """The rates that are tried go up to 2,684, where a weight of bf16 forgets what it was."""
    task = prepare(small, cache_folder())
    trial = Trial(task.resolve(small), task)
    trial.trainer.model.to(torch.bfloat16)
    kept: list[dict[str, torch.Tensor]] = []
    ask = task.loss

    def noted(model: Any, parts: Any, *, hidden_states: bool) -> Any:
        kept.append({name: weight.detach().clone() for name, weight in model.named_parameters()})
        return ask(model, parts, hidden_states=hidden_states)

    task.loss = noted
    critical_rate(trial, task)
    after = dict(trial.trainer.model.named_parameters())
    assert any(all(torch.equal(weights[name], after[name]) for name in after) for weights in kept)


def test_the_usual_rates_are_those_that_a_user_would_type() -> None:
    assert {0.00015, 0.0003, 0.6} < set(forecasts.RATES)


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


@pytest.mark.slow
def test_an_absurd_rate_is_told_to_die_and_a_small_one_to_live(small: RunConfig) -> None:
    task = prepare(small, cache_folder())
    config = task.resolve(small)
    steps = sweep_rates(Trial(config, task), STEPS)
    assert steps[-1].lr == pytest.approx(1.0)
    test = RangeTest(tuple(step for step in steps if step.finite), critical_rate(Trial(config, task), task))
    assert judge(test, replace(config.train, lr=1e-4), RATES, None).lives
    absurd = judge(test, replace(config.train, lr=30.0), RATES, None)
    assert not absurd.lives
    assert absurd.shortest_warmup is None


@pytest.mark.slow
def test_a_configuration_in_fp16_is_forecast_by_steps_in_fp32(small: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kilolayer.probe.forecast.STEPS", 3)
    task = prepare(small, cache_folder())
    precise, half = (
        forecast(task.resolve(replace(small, train=replace(small.train, precision=precision))), task).measured.steps
        for precision in ("fp32", "fp16")
    )
    assert half == precise


@pytest.mark.matrix(4)
@pytest.mark.parametrize("task", LAYERED)
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


@pytest.mark.slow
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


def test_a_configuration_for_shards_is_forecast_and_diagnosed_as_one_process(small: RunConfig) -> None:
    sharded = replace(small, train=replace(small.train, shard="full", shard_unit=2, reshard_after_forward=False))
    task = prepare(sharded, cache_folder())
    assert Trial(task.resolve(sharded), task).config.train.shard == "none"
    assert starting_model(task.resolve(sharded), task, torch.device("cpu")) is not None
