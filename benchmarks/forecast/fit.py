"""Fit the forecast, and count its errors on series that it was not fitted on: writes results.json and table.md.

python benchmarks/forecast/fit.py [SERIES.jsonl]      # from the signals of measure.py, or again from results.json

The labels are those of benchmarks/dead/runs.json. A run lives if it finished, and breaks if it diverged, has a dead stack, or
learned less than token frequencies (or nothing of its source) although a lower rate of its series lives. Runs of which neither
is so were only slow, and are left out. Each run is forecast by a logistic regression on the series outside its fold.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "dead"))

from table import RUNS

from kilolayer.probe.forecast import HIGHEST, RangeTest
from kilolayer.probe.trial import Measured

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
FOLDS, PENALTY = 15, 0.001
Example = dict[str, Any]
Signals = Callable[[Example], list[float]]


def range_test(series: dict[str, Any]) -> RangeTest:
    """The range test of a series, as `kilolayer forecast` has it."""
    steps = [
        Measured(step["lr"], step["nll"], step["gradient"], {"decoder": (step["reached"], 1.0)}) for step in series["sweep"]
    ]
    return RangeTest(tuple(step for step in steps if step.finite), series["critical"])


def examples(series: Sequence[dict[str, Any]]) -> list[Example]:
    """The runs of all measured series that lived or broke."""
    runs = [run | {"series": int(run["name"].split()[0])} for run in json.loads(RUNS.read_text())["runs"]]
    lives = [(run["series"], run["lr"]) for run in runs if run["label"] == "finished"]
    found: list[Example] = []
    for measured in series:
        test = range_test(measured)
        for run in (run for run in runs if run["series"] == measured["series"]):
            broke = bool(run["dead"]) or run["label"] == "diverged"
            if not broke and run["label"] != "finished":
                broke = any(run["series"] == each and lr < run["lr"] for each, lr in lives)
                if not broke:
                    continue
            found.append({"run": run, "test": test, "series": measured, "broke": broke})
    return found


def of_forecast(example: Example) -> list[float]:
    """The signals of `kilolayer forecast`."""
    run = example["run"]
    return list(example["test"].signals(run["lr"], max(1, round(run["warmup"] * run["steps"])) / run["steps"]))


def one(place: int) -> Signals:
    """One of the signals of `kilolayer forecast` alone."""
    return lambda example: [of_forecast(example)[place]]


def rate(example: Example) -> list[float]:
    return [math.log(example["run"]["lr"])]


def update(example: Example) -> list[float]:
    """The size of the first update at this rate."""
    series = example["series"]
    return [math.log(example["run"]["lr"] * max(series["adam_start"], 1e-12) / series["start_lr"])]


def logits(example: Example) -> list[float]:
    """The rate over that at which the largest attention logit is ten times its first value."""
    steps = example["series"]["sweep"]
    grown = next((step["lr"] for step in steps if step["logit"] > 10 * steps[0]["logit"]), HIGHEST)
    return [math.log(example["run"]["lr"] / grown)]


METHODS: dict[str, Signals] = {
    "`kilolayer forecast`: the four below": of_forecast,
    "what the first layers have lost of the gradient": one(0),
    "how far the loss has risen": one(1),
    "the rate over the critical rate": one(2),
    "the warm-up": one(3),
    "the learning rate": rate,
    "the size of the first update": update,
    "the growth of the attention logits": logits,
    "the four, and the attention logits": lambda example: of_forecast(example) + logits(example),
}


def fit(runs: Sequence[Example], signals: Signals) -> torch.Tensor:
    """The weights of a logistic regression on the signals and a constant, with a small penalty on standardized signals."""
    inputs = torch.tensor([signals(run) for run in runs], dtype=torch.float64)
    broke = torch.tensor([float(run["broke"]) for run in runs], dtype=torch.float64)
    mean, deviation = inputs.mean(0), inputs.std(0) + 1e-9
    inputs = torch.cat([(inputs - mean) / deviation, torch.ones(len(inputs), 1, dtype=torch.float64)], 1)
    weights = torch.zeros(inputs.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = torch.nn.functional.binary_cross_entropy_with_logits(inputs @ weights, broke)
        value = value + PENALTY * weights[:-1].square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    found = weights.detach()
    own = found[:-1] / deviation
    return torch.cat([own, found[-1:] - own @ mean])


def probabilities(runs: Sequence[Example], signals: Signals, weights: torch.Tensor) -> list[float]:
    inputs = torch.tensor([[*signals(run), 1.0] for run in runs], dtype=torch.float64)
    return torch.sigmoid(inputs @ weights).tolist()


def held_out(runs: Sequence[Example], signals: Signals) -> list[float]:
    """The probability of each run, by weights fitted on the series of the other folds."""
    series = sorted({run["run"]["series"] for run in runs})
    random.Random(1).shuffle(series)
    found = [math.nan] * len(runs)
    for fold in range(FOLDS):
        left = set(series[fold::FOLDS])
        weights = fit([run for run in runs if run["run"]["series"] not in left], signals)
        places = [place for place, run in enumerate(runs) if run["run"]["series"] in left]
        for place, value in zip(places, probabilities([runs[place] for place in places], signals, weights), strict=True):
            found[place] = value
    return found


def scores(runs: Sequence[Example], given: Sequence[float]) -> tuple[int, float]:
    """How many are right, and the Brier score."""
    pairs = [(run["broke"], value) for run, value in zip(runs, given, strict=True)]
    right = sum((value > 0.5) == broke for broke, value in pairs)
    return right, fmean((value - broke) ** 2 for broke, value in pairs)


def markdown(runs: Sequence[Example], given: dict[str, list[float]]) -> str:
    total, broke = len(runs), sum(run["broke"] for run in runs)
    series = len({run["run"]["series"] for run in runs})
    lines = [
        "# The forecast on runs that it was not fitted on",
        "",
        f"{total} runs of {series} series, of which {broke} broke; each is forecast by weights fitted on the series outside",
        f"its fold ({FOLDS} folds). The Brier score is the mean square of probability minus outcome;",
        f"that of always saying {broke / total:.0%} is {broke / total * (1 - broke / total):.3f}.",
        "",
        "| forecast from | right | Brier score |",
        "|---|---|---|",
    ]
    for name, values in given.items():
        right, brier = scores(runs, values)
        lines.append(f"| {name} | {right} ({right / total:.1%}) | {brier:.3f} |")
    own = next(iter(given.values()))
    lines += ["", "`kilolayer forecast`:", "", "| probability that it breaks | runs | broke |", "|---|---|---|"]
    for low in (0.0, 0.2, 0.4, 0.6, 0.8):
        there = [run["broke"] for run, value in zip(runs, own, strict=True) if low <= value < low + 0.2 + (low == 0.8)]
        lines.append(f"| {low:.1f} to {low + 0.2:.1f} | {len(there)} | {sum(there)} |")
    lines += ["", "| recipe | runs | broke | right |", "|---|---|---|---|"]
    for recipe in sorted({run["run"]["recipe"] for run in runs}):
        there = [(run["broke"], value > 0.5) for run, value in zip(runs, own, strict=True) if run["run"]["recipe"] == recipe]
        lines.append(f"| {recipe} | {len(there)} | {sum(a for a, _ in there)} | {sum(a == b for a, b in there)} |")
    return "\n".join(lines) + "\n"


def _short(steps: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: float(f"{value:.3g}") for name, value in step.items()} for step in steps]


def main() -> None:
    if len(sys.argv) > 1:
        rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
        series = sorted((row for row in rows if "error" not in row), key=lambda row: row["series"])
        series = [row | {"critical": min(row["critical"], HIGHEST), "sweep": _short(row["sweep"])} for row in series]
    else:
        series = json.loads(RESULTS.read_text())["series"]
    runs = examples(series)
    given = {name: held_out(runs, signals) for name, signals in METHODS.items()}
    right, brier = scores(runs, given[next(iter(METHODS))])
    about = {
        "command": "python benchmarks/forecast/measure.py WORK; python benchmarks/forecast/fit.py WORK/series.jsonl",
        "weights": [float(f"{value:.3g}") for value in fit(runs, of_forecast).tolist()],
        "right": right,
        "of": len(runs),
        "brier": float(f"{brier:.3g}"),
    }
    text = json.dumps(about, indent=1)[:-2] + ',\n "series": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in series)
    RESULTS.write_text(text + "\n ]\n}\n")
    (HERE / "table.md").write_text(markdown(runs, given))
    print(about)


if __name__ == "__main__":
    main()
