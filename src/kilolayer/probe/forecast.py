"""Forecasts the largest learning rate and the shortest warm-up with which a configuration trains, from some 80 steps."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from kilolayer import config as configuration
from kilolayer.display import Displayed
from kilolayer.errors import OptionError
from kilolayer.evaluate.stack_label import as_fraction
from kilolayer.files.paths import as_path
from kilolayer.probe.critical_rate import critical_rate
from kilolayer.probe.subject import require_layers
from kilolayer.probe.trial import Measured, Trial
from kilolayer.runs.run import cache_folder, choose_device, prepare
from kilolayer.runs.start import start_of, started_config, vocabulary_of
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.task import Task
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.torch_state import own_torch_state

STEPS = 60
LOST, RISEN, CRITICAL, WARMUP, CONSTANT = 1.42, 2.05, 0.278, -0.296, -4.19
"""The log-odds that a run breaks are the constant and these times its signals, `RangeTest.signals` (benchmarks/forecast)."""
RATES = tuple(float(f"{digit}e{exponent}") for exponent in range(-6, 0) for digit in (1, 1.5, 2, 3, 4, 6, 8))
WARMUPS = 0, *(digit * 10**exponent for exponent in range(1, 6) for digit in (1, 2, 4, 7))
RIGHT, OF, BRIER = 236, 261, 0.078
"""Runs that were forecast right by weights fitted without their series, and the Brier score of the probabilities."""
LOWEST, HIGHEST = 1e-5, 1.0
SMALLEST = 1e-12
"""Smaller shares of the gradient count as this value."""


@dataclass(frozen=True)
class RangeTest:
    """The results of a learning-rate range test.

    steps: those that were finite, with rising rates. critical: the smallest rate along an update that raises the loss; infinite
    if there is none.
    """

    steps: tuple[Measured, ...]
    critical: float

    def lost(self, lr: float) -> float:
        """How far the share of the gradient that reaches the first layers had fallen from its maximum by this rate, in nats."""
        shares = smoothed([math.log(max(step.reached, SMALLEST)) for step in self.steps])
        return self._largest(lr, [largest - share for largest, share in zip(accumulate(shares, max), shares, strict=True)])

    def risen(self, lr: float) -> float:
        """How far the loss had risen from its minimum by this rate, in nats."""
        losses = smoothed([step.nll for step in self.steps])
        return self._largest(lr, [loss - lowest for lowest, loss in zip(accumulate(losses, min), losses, strict=True)])

    def _largest(self, lr: float, values: Sequence[float]) -> float:
        return max((value for step, value in zip(self.steps, values, strict=True) if step.lr <= lr), default=0.0)

    def signals(self, lr: float, warmup: float) -> tuple[float, float, float, float]:
        """What the odds are made of. warmup: as a share of the run's steps."""
        critical = min(self.critical, HIGHEST)
        return self.lost(lr), math.log1p(10 * self.risen(lr)), math.log(lr / critical), math.log(warmup)

    def breaks(self, lr: float, warmup: float) -> float:
        """The probability that a run with this learning rate breaks; 1 beyond the last rate at which a step was finite.

        warmup: as a share of the run's steps.
        """
        if lr > max((step.lr for step in self.steps), default=0.0):
            return 1.0
        weights = (LOST, RISEN, CRITICAL, WARMUP)
        odds = sum(map(operator.mul, weights, self.signals(lr, warmup))) + CONSTANT
        return 1 / (1 + math.exp(-odds)) if odds > -700 else 0.0


@dataclass(frozen=True)
class Forecast(Displayed):
    """The forecast for a configuration; it prints what `kilolayer forecast` prints.

    A rate and a warm-up are stable if a run with them is more likely to live than to break.
    largest_lr: the largest of the candidate rates that is stable with the configuration's warm-up; None if none is.
    shortest_warmup: the shortest of the candidate warm-ups, in steps, with which the configuration's rate is stable; or None.
    breaks: the probability that the configuration as it is breaks: it diverges, a stack dies, or it learns less than token
    frequencies. why: the reason in words. measured: the steps and their results. sure: how good such forecasts were.
    """

    _laid_out_by = "kilolayer.probe.forecast_parts"

    largest_lr: float | None
    shortest_warmup: int | None
    lr: float
    warmup: int
    breaks: float
    why: str
    measured: RangeTest
    sure: str = f"of {OF} small runs of other models, {RIGHT} were forecast right"

    @property
    def lives(self) -> bool:
        """Whether the configuration is more likely to live than to break."""
        return self.breaks <= 0.5


@own_torch_state("kl.forecast")
def forecast(
    config: RunConfig | Path | str,
    task: Task | None = None,
    rates: Sequence[float] | None = None,
    warmups: Sequence[int] | None = None,
) -> Forecast:
    """Take up to 60 steps of a run with a rising learning rate, and 20 with a small one, and make a forecast from them.

    config: the configuration of a run, or its file. task: the data, if already prepared; config must then be the configuration
    that the task resolved. rates, warmups: the candidates; None: RATES or WARMUPS, and the configuration's own value. Warm-ups
    that are longer than the run are ignored.
    Nothing is written to disk, and the model is discarded. The random state and the number of threads of torch are restored
    afterwards; it is refused while another thread trains, forecasts or diagnoses.
    """
    for name, given in (("rates", rates), ("warmups", warmups)):
        if given is None:
            continue
        if not (isinstance(given, Iterable) and all(isinstance(value, int | float) and value >= 0 for value in given)):
            raise OptionError(
                f"{name} has a value that is not a number, or below 0",
                where=name,
                fix="give rates above 0 and whole numbers of steps",
            )
    if isinstance(config, RunConfig):
        whole = config
    else:
        path = as_path(config, "config")
        whole = started_config(configuration.load(path), str(path))
    require_layers(whole)
    choose_device(whole.train.device)  # before any work
    if task is None:
        task = prepare(whole, cache_folder(), vocabulary_of(start_of(whole), whole))
        whole = task.resolve(whole)
    # Compiling layers would take longer than so few steps, and fp16 would not have found its loss scale by then.
    precision = "fp32" if whole.train.precision == "fp16" else whole.train.precision
    eager = replace(whole, train=replace(whole.train, eager=True, precision=precision))
    trial = Trial(eager, task)
    steps = tuple(step for step in sweep_rates(trial, STEPS) if step.finite)
    test = RangeTest(steps, critical_rate(Trial(eager, task), task))
    return judge(test, trial.config.train, rates, warmups)


def judge(
    test: RangeTest, train: TrainConfig, rates: Sequence[float] | None = None, warmups: Sequence[int] | None = None
) -> Forecast:
    """Make the forecast for these options from the results of the range test; rates, warmups: as for `forecast`."""
    # With the configuration's own values among the candidates, the answers agree with whether it lives.
    rates = (*RATES, train.lr) if rates is None else rates
    warmups = (*WARMUPS, train.warmup_steps) if warmups is None else warmups

    def breaks(lr: float, warmup: int) -> float:
        return test.breaks(lr, max(1, warmup) / train.steps) if lr else 0.0

    lived = [rate for rate in rates if breaks(rate, train.warmup_steps) <= 0.5]
    enough = [steps for steps in warmups if steps <= train.steps and breaks(train.lr, steps) <= 0.5]
    return Forecast(
        max(lived, default=None),
        min(enough, default=None),
        train.lr,
        train.warmup_steps,
        breaks(train.lr, train.warmup_steps),
        _reason(test, train.lr),
        test,
    )


def _reason(test: RangeTest, lr: float) -> str:
    kept, risen = math.exp(-test.lost(lr)), test.risen(lr)
    reached = (
        f"as the rate rose to {lr:g}, the first layers of a stack kept {as_fraction(kept)} of their share of the gradient"
        if kept < 0.5
        else f"as the rate rose to {lr:g}, the gradient reached the first layers of every stack"
    )
    rose = f", and the loss rose by {risen:.2g} nats" if risen > 0.05 else ""
    raises = (
        "no rate along an update raises the loss"
        if math.isinf(test.critical)
        else f"the smallest rate along an update that raises the loss is {test.critical:.2g}"
    )
    return f"{reached}{rose}; {raises}"


def sweep_rates(trial: Trial, steps: int, lowest: float = LOWEST, highest: float = HIGHEST) -> list[Measured]:
    """Take steps with a rate that rises geometrically from `lowest` to `highest`; stop after the first that is not finite."""
    found: list[Measured] = []
    for index in range(steps):
        found.append(trial.step(lowest * (highest / lowest) ** (index / max(1, steps - 1)), layers=True))
        if not found[-1].finite:
            break
    return found


def smoothed(values: Sequence[float], weight: float = 0.7) -> list[float]:
    """The exponential moving average with this weight on the past, bias-corrected; infinite from the first non-finite value."""
    mean, means = 0.0, []
    for count, value in enumerate(values, 1):
        mean = weight * mean + (1 - weight) * value
        means.append(mean / (1 - weight**count) if math.isfinite(mean) else math.inf)
    return means
