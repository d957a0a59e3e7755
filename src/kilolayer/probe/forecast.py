"""From at most 60 steps, the largest learning rate and the shortest warm-up that a configuration survives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kilolayer import config as configuration
from kilolayer.errors import OptionError
from kilolayer.probe.range_test import fading_rate, rise, turning_rate
from kilolayer.probe.trial import Measured, Trial
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.task import Task
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.run import cache_folder, choose_device, prepare
from kilolayer.training.start import start_of, started_config, vocabulary_of

STEPS = 60
LEVEL = 0.01
"""A stack has faded where less than this part reaches its first layers of what reached them before."""
TURN, FADE = 1.0, 0.5
"""The largest rate that lives, over the rate at which the loss turns, and over that at which a stack fades, with a warm-up of
100 steps. Set by hand on the runs of benchmarks/forecast/cpu.json, as POWER is, and tested on those of results.json beside
it, which other values would fit no better."""
POWER, USUAL_WARMUP = 0.5, 100
"""A warm-up n times as long lets a stack live at a rate n^POWER times as large. Where the loss turns, no warm-up helps."""
RATES = tuple(digit * 10.0**exponent for exponent in range(-6, 0) for digit in (1, 1.5, 2, 3, 4, 6, 8))
WARMUPS = tuple(digit * 10**exponent for exponent in range(1, 6) for digit in (1, 2, 4, 7))
SURENESS = "right for 43 of 49 small runs of 36 and 100 layers, and for 63 of 74 of 6 and 18"


@dataclass(frozen=True)
class RangeTest:
    """What the steps with a rising rate showed.

    turned: the rate of the lowest loss. faded: the rate at which hardly any gradient reached the first layers of a stack any
    more; None where it always did. Steps that are not finite do not tell it.
    """

    steps: tuple[Measured, ...]
    turned: float
    faded: float | None

    @classmethod
    def of(cls, steps: Sequence[Measured]) -> RangeTest:
        """Read off the steps what a forecast needs."""
        rates = [step.lr for step in steps]
        finite = [step for step in steps if step.finite]
        faded = fading_rate([step.lr for step in finite], [step.reached for step in finite], LEVEL)
        return cls(tuple(steps), turning_rate(rates, [step.nll for step in steps]), faded)

    def limit(self, warmup: int) -> float:
        """The largest rate that lives with a warm-up of so many steps: min(TURN turned, FADE faded (warmup / 100)^POWER)."""
        if self.faded is None:
            return TURN * self.turned
        return min(TURN * self.turned, FADE * self.faded * (max(1, warmup) / USUAL_WARMUP) ** POWER)


@dataclass(frozen=True)
class Forecast:
    """largest_lr: of the rates that were asked for, the largest that lives with the configuration's warm-up.

    shortest_warmup: of the warm-ups, in steps, the shortest with which the configuration's rate lives. None: not one of them.
    why: what decided, in words. measured: the steps, and what they showed. sure: what the forecast rests on.
    """

    largest_lr: float | None
    shortest_warmup: int | None
    lr: float
    warmup: int
    why: str
    measured: RangeTest
    sure: str = SURENESS

    @property
    def lives(self) -> bool:
        """Whether the configuration as it is should live."""
        return self.lr <= self.measured.limit(self.warmup)


def forecast(
    config: RunConfig | Path | str,
    task: Task | None = None,
    rates: Sequence[float] = RATES,
    warmups: Sequence[int] | None = None,
) -> Forecast:
    """Take 60 steps of the run that a configuration describes, at rates that rise until the model breaks, and judge by them.

    config: of a run, or the file that it stands in. task: its data, where they are prepared already; the configuration is then
    the one that the task resolved. rates, warmups: what to choose from; warmups: of at most the steps of the run, in its place.
    Nothing is written, and the model is thrown away.
    """
    for name, given in (("rates", rates), ("warmups", warmups)):
        if given is not None and not all(isinstance(value, int | float) and value >= 0 for value in given):
            raise OptionError(
                f"{name} has a value that is not a number, or below 0",
                where=name,
                fix="give rates above 0 and whole numbers of steps",
            )
    whole = config if isinstance(config, RunConfig) else started_config(configuration.load(Path(config)))
    choose_device(whole.train.device)  # before any work
    if task is None:
        task = prepare(whole, cache_folder(), vocabulary_of(start_of(whole), whole))
        whole = task.resolve(whole)
    # So few steps are over before layers would have been compiled, and before fp16 has found the scale of its loss.
    precision = "fp32" if whole.train.precision == "fp16" else whole.train.precision
    trial = Trial(replace(whole, train=replace(whole.train, eager=True, precision=precision)), task)
    return judge(RangeTest.of(rise(trial, STEPS)), trial.config.train, rates, warmups)


def judge(test: RangeTest, train: TrainConfig, rates: Sequence[float], warmups: Sequence[int] | None) -> Forecast:
    """The forecast for these options, by what the range test showed."""
    chosen = [0, *WARMUPS] if warmups is None else warmups
    lived = [rate for rate in rates if rate <= test.limit(train.warmup_steps)]
    enough = [steps for steps in chosen if steps <= train.steps and train.lr <= test.limit(steps)]
    return Forecast(max(lived, default=None), min(enough, default=None), train.lr, train.warmup_steps, _reason(test), test)


def _reason(test: RangeTest) -> str:
    turned = f"the loss turned at a rate of {test.turned:.1g}"
    if test.faded is None:
        return f"{turned}, and the gradient reached the first layers of every stack"
    return f"at {test.faded:.1g} the first layers of a stack had lost {1 - LEVEL:.0%} of the gradient, and {turned}"
