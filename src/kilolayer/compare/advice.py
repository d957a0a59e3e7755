"""What to do about runs of a comparison that went wrong, and what to train next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise

from kilolayer import recipes
from kilolayer.compare.comparison import Comparison
from kilolayer.compare.flat_options import plain_recipe
from kilolayer.compare.grid import LAYERS, RECIPE, SEED, TASK, same, shown_value
from kilolayer.compare.measure import VALIDATION_LOSS
from kilolayer.compare.outcome import ABOVE_START, FEW
from kilolayer.compare.result import Result
from kilolayer.compare.table import ComparisonTable, Edge
from kilolayer.report.comparison_view import NextStep
from kilolayer.report.record import number
from kilolayer.terminal import counted

SLOWER = 4
"""The factor of a smaller rate and of a longer warm-up, as in the advice of `kilolayer diagnose`."""
WITHOUT_BOUNDS = ("train.lr", "train.eps", "train.warmup_steps")
"""Options that may be tried beyond the values of a comparison; others, such as a dropout, have their own limits."""
SEEDS = (1, 2, 3)
SHORT = 1000
"""Steps below which a run without progress was too short to blame its learning rate, whatever it has read of its text."""


def advice_on(result: Result, results: Sequence[Result]) -> str:
    """What to change about a run that died or failed: what a finished run beside it had, else a slower start."""
    if result.outcome.kind == "failed":
        return "Its log has the whole error. The command of this comparison tries it again."
    if (other := _finished_beside(result, results)) is not None:
        had = [f"{name} {shown_value(name, other.options.get(name))}" for name in _different(result, other)]
        return f"Finished with {', '.join(had)}."
    lr, warmup, steps = (number(result.config, "train", name) for name in ("lr", "warmup_steps", "steps"))
    if math.isnan(lr):
        return "Look at its report and its log."
    if result.outcome.kind == "no_progress" and warmup >= steps:
        return f"It ended within its warm-up of {warmup:,.0f} steps: raise train.steps or lower train.warmup_steps."
    if result.outcome.kind == "no_progress" and (higher := _higher_rate(result, results)) is not None:
        return f"Train for more than {steps:,.0f} steps, or try train.lr {_digits(higher)}: the loss falls as the rate rises."
    if result.outcome.kind == "no_progress" and _is_short(result):
        return f"The run is short: train for more than {steps:,.0f} steps before you judge its options."
    longer = "" if math.isnan(warmup) else f" or train.warmup_steps {max(warmup, 100) * SLOWER:,.0f}"
    tried = f"train.lr {_digits(lr / SLOWER)}{longer}"
    if result.outcome.kind == "no_progress":
        return f"Train for more than {steps:,.0f} steps, or try {tried}."
    model = result.config.get("model")
    recipe = plain_recipe(model.get("recipe", recipes.DEFAULT)) if isinstance(model, dict) else recipes.DEFAULT
    return f"Try {tried}" + ("." if recipe == recipes.DEFAULT else f", or model.recipe {recipes.DEFAULT}.")


def next_steps(comparison: Comparison, results: Sequence[Result], table: ComparisonTable) -> list[NextStep]:
    """What to train or look at next, each with its command."""
    steps: list[NextStep] = []
    if comparison.base is not None:
        again = f"kilolayer compare {shlex.quote(str(comparison.folder))}"
        steps += [NextStep(text, f"{again}{options}") for text, options in _extensions(results, table)]
    lost = [result for result in _alone_in_death(results) if result.outcome.died]
    if lost:
        text = f"See where in depth {lost[0].name} went wrong."
        steps.append(NextStep(text, f"kilolayer diagnose {shlex.quote(str(lost[0].folder))}"))
    return steps


def _extensions(results: Sequence[Result], table: ComparisonTable) -> Iterator[tuple[str, str]]:
    """What to add to a comparison, with the options of the command that adds it."""
    open_ = [result for result in results if result.outcome.kind in ("waiting", "unfinished", "failed")]
    if open_:
        yield f"Train the rest: {counted(len(open_), 'run')} without a result.", ""
    for name in dict.fromkeys(edge.name for edge in table.edges if edge.name in WITHOUT_BOUNDS):
        beyond = sorted({value for edge in table.edges if edge.name == name if (value := _beyond(edge)) is not None})
        if beyond:
            text = f"The best {name} of some cells is the smallest or the largest tried: try values beyond."
            yield text, f" --set {name}={','.join(map(_digits, beyond))}"
    yield from _where_none_finished(results)
    seeds = {number(result.config, "train", "seed") for result in results if result.config}
    alive = [cell for cell in table.cells if cell.best.alive]
    if len(alive) > 1 and not open_ and all(len(cell.best.results) == 1 for cell in table.cells) and len(seeds) == 1:
        shown = ",".join(f"{seed:.0f}" for seed in sorted({*seeds, *SEEDS}) if not math.isnan(seed))
        yield "Every cell has a single seed: repeat it with others to see which differences last.", f" --seeds {shown}"


def _where_none_finished(results: Sequence[Result]) -> Iterator[tuple[str, str]]:
    """A smaller rate where runs diverged or died; where they were only slow, more steps or a higher rate."""
    lost = [result for result in _alone_in_death(results) if result.outcome.died and _rate(result) > 0]
    slow = [result for result in lost if result.outcome.kind == "no_progress"]
    higher = [rate for result in slow if (rate := _higher_rate(result, results)) is not None]
    if higher:
        text = "Where no run made progress and the loss falls as the rate rises, try a higher learning rate."
        yield text, f" --set train.lr={_digits(max(higher))}"
    short = [result for result in slow if _is_short(result)]
    if steps := [steps for result in short if (steps := number(result.config, "train", "steps")) > 0]:
        yield "Where short runs made no progress, train longer.", f" --set train.steps={max(steps) * SLOWER:.0f}"
    if rates := [_rate(result) for result in lost if result not in short and _higher_rate(result, results) is None]:
        yield "Where no run finished, try a smaller learning rate.", f" --set train.lr={_digits(min(rates) / SLOWER)}"


def _rate(result: Result) -> float:
    return number(result.config, "train", "lr")


def _is_short(result: Result) -> bool:
    """Whether a run was too short to judge: less than one epoch, or few steps."""
    epoch = number(result.train[-1], "epoch") if result.train else math.nan
    return epoch < 1 or number(result.config, "train", "steps") < SHORT


def _higher_rate(result: Result, results: Sequence[Result]) -> float | None:
    """A rate beyond those of the runs of this task, recipe and depth, if all were slow and their loss fell with the rate."""
    beside = [each for each in results if _same_model(each, result) and _rate(each) > 0]
    losses: dict[float, float] = {}
    for each in beside:
        losses[_rate(each)] = min(losses.get(_rate(each), math.inf), VALIDATION_LOSS.of(each))
    rates = sorted(losses)
    falling = all(losses[after] < losses[before] for before, after in pairwise(rates))
    if len(rates) < 2 or not falling or any(each.outcome.kind != "no_progress" for each in beside):
        return None
    if not any(_still_falls(each) for each in beside if _rate(each) == rates[-1]):
        return None
    return rates[-1] * min(rates[-1] / rates[-2], SLOWER)


def _still_falls(result: Result) -> bool:
    """Whether the training loss fell in the second half of a run; one that stays where it is needs time, not a higher rate."""
    losses = [number(row, "nll" if "nll" in row else "loss") for row in result.train]
    return len(losses) < FEW or losses[-1] < losses[len(losses) // 2] - ABOVE_START


def _alone_in_death(results: Sequence[Result]) -> list[Result]:
    """Runs without a result of the same task, recipe and depth that finished."""
    bad = [result for result in results if result.outcome.kind not in ("finished", "waiting", "unfinished")]
    return [result for result in bad if _finished_beside(result, results) is None]


def _finished_beside(result: Result, results: Sequence[Result]) -> Result | None:
    """The finished run of the same task, recipe and depth that differs in the fewest options, rather not in the seed."""
    beside = [each for each in results if each.outcome.kind == "finished" and _same_model(each, result)]
    ranked = [(len(names := _different(result, each)), SEED in names, index) for index, each in enumerate(beside)]
    return beside[min(ranked)[2]] if ranked else None


def _same_model(one: Result, other: Result) -> bool:
    names = (TASK, RECIPE, LAYERS)
    return same({name: one.options.get(name) for name in names}, {name: other.options.get(name) for name in names})


def _different(result: Result, other: Result) -> list[str]:
    names = dict.fromkeys([*result.options, *other.options])
    return [name for name in names if not same({"": result.options.get(name)}, {"": other.options.get(name)})]


def _beyond(edge: Edge) -> float | None:
    """The next value beyond the edge, as far from it as the one within; None if the values do not say."""
    first, second = sorted(edge.values, reverse=edge.is_largest)[:2]
    return first * first / second if first > 0 and second > 0 else None


def _digits(value: float) -> str:
    return f"{value:.2g}".replace("e-0", "e-") if value < 10 else f"{value:.0f}"
