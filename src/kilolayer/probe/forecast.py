"""Forecasts the largest learning rate and the shortest warm-up with which a configuration trains, from at most 60 steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kilolayer import config as configuration
from kilolayer.display import Displayed
from kilolayer.errors import OptionError
from kilolayer.files.paths import as_path
from kilolayer.probe.range_test import fading_rate, sweep_rates, turning_rate
from kilolayer.probe.trial import Measured, Trial
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.task import Task
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.run import cache_folder, choose_device, prepare
from kilolayer.training.start import start_of, started_config, vocabulary_of

STEPS = 60
LEVEL = 0.01
"""A stack has faded when the share of the gradient that reaches its first layers falls below this fraction of its maximum."""
TURN, FADE = 1.0, 0.5
"""The largest stable learning rate, relative to the rate at which the loss turns, and to the rate at which a stack fades, with
a warm-up of 100 steps. These values and POWER were set by hand on the runs of benchmarks/forecast/cpu.json and tested on those
of results.json beside it; other values would not fit the latter better."""
POWER, USUAL_WARMUP = 0.5, 100
"""With a warm-up n times as long, a stack survives an n^POWER times larger rate. No warm-up helps once the loss turns."""
RATES = tuple(float(f"{digit}e{exponent}") for exponent in range(-6, 0) for digit in (1, 1.5, 2, 3, 4, 6, 8))
WARMUPS = 0, *(digit * 10**exponent for exponent in range(1, 6) for digit in (1, 2, 4, 7))
SURENESS = "right for 48 of 55 small runs of 36 to 200 layers, and for 63 of 74 of 6 and 18"


@dataclass(frozen=True)
class RangeTest:
    """The results of a learning-rate range test.

    turned: the rate at which the loss was lowest. faded: the rate at which the gradient no longer reached the first layers of a
    stack; None if it always did. Steps that are not finite are ignored for `faded`.
    """

    steps: tuple[Measured, ...]
    turned: float
    faded: float | None

    @classmethod
    def of(cls, steps: Sequence[Measured]) -> RangeTest:
        """Compute `turned` and `faded` from the measured steps."""
        rates = [step.lr for step in steps]
        finite = [step for step in steps if step.finite]
        faded = fading_rate([step.lr for step in finite], [step.reached for step in finite], LEVEL)
        return cls(tuple(steps), turning_rate(rates, [step.nll for step in steps]), faded)

    def limit(self, warmup: int) -> float:
        """The largest stable rate with a warm-up of this many steps: min(TURN turned, FADE faded (warmup / 100)^POWER)."""
        if self.faded is None:
            return TURN * self.turned
        return min(TURN * self.turned, FADE * self.faded * (max(1, warmup) / USUAL_WARMUP) ** POWER)


@dataclass(frozen=True)
class Forecast(Displayed):
    """The forecast for a configuration; it prints what `kilolayer forecast` prints.

    largest_lr: the largest of the candidate rates that is stable with the configuration's warm-up; None if none is.
    shortest_warmup: the shortest of the candidate warm-ups, in steps, with which the configuration's rate is stable; or None.
    why: the reason in words. measured: the steps and their results. sure: what the forecast is based on.
    """

    _laid_out_by = "kilolayer.report.forecast_parts"

    largest_lr: float | None
    shortest_warmup: int | None
    lr: float
    warmup: int
    why: str
    measured: RangeTest
    sure: str = SURENESS

    @property
    def lives(self) -> bool:
        """Whether the configuration should train without breaking as it is."""
        return self.lr <= self.measured.limit(self.warmup)


def forecast(
    config: RunConfig | Path | str,
    task: Task | None = None,
    rates: Sequence[float] | None = None,
    warmups: Sequence[int] | None = None,
) -> Forecast:
    """Take up to 60 steps of a run with a rising learning rate, until the model breaks, and make a forecast from them.

    config: the configuration of a run, or its file. task: the data, if already prepared; config must then be the configuration
    that the task resolved. rates, warmups: the candidates; None: RATES or WARMUPS, and the configuration's own value. Warm-ups
    that are longer than the run are ignored.
    Nothing is written to disk, and the model is discarded. The random state and the number of threads of torch are restored
    afterwards.
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
    whole = config if isinstance(config, RunConfig) else started_config(configuration.load(as_path(config, "config")))
    choose_device(whole.train.device)  # before any work
    if task is None:
        task = prepare(whole, cache_folder(), vocabulary_of(start_of(whole), whole))
        whole = task.resolve(whole)
    # Compiling layers would take longer than so few steps, and fp16 would not have found its loss scale by then.
    precision = "fp32" if whole.train.precision == "fp16" else whole.train.precision
    threads = torch.get_num_threads()
    with torch.random.fork_rng(), ExitStack() as after:
        after.callback(torch.set_num_threads, threads)
        trial = Trial(replace(whole, train=replace(whole.train, eager=True, precision=precision)), task)
        test = RangeTest.of(sweep_rates(trial, STEPS))
    return judge(test, trial.config.train, rates, warmups)


def judge(
    test: RangeTest, train: TrainConfig, rates: Sequence[float] | None = None, warmups: Sequence[int] | None = None
) -> Forecast:
    """Make the forecast for these options from the results of the range test; rates, warmups: as for `forecast`."""
    # With the configuration's own values among the candidates, the answers agree with whether it lives.
    rates = (*RATES, train.lr) if rates is None else rates
    warmups = (*WARMUPS, train.warmup_steps) if warmups is None else warmups
    lived = [rate for rate in rates if rate <= test.limit(train.warmup_steps)]
    enough = [steps for steps in warmups if steps <= train.steps and train.lr <= test.limit(steps)]
    return Forecast(max(lived, default=None), min(enough, default=None), train.lr, train.warmup_steps, _reason(test), test)


def _reason(test: RangeTest) -> str:
    turned = f"the loss was lowest at a rate of {test.turned:.1g}"
    if test.faded is None:
        return f"{turned}, and the gradient reached the first layers of every stack"
    return f"at {test.faded:.1g} the first layers of a stack had lost {1 - LEVEL:.0%} of the gradient, and {turned}"
