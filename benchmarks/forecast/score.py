"""Score the forecasting methods, with errors by direction: calibrated on shallow rows, tested on the others.

`kilolayer forecast` has its own constants, which were fixed before these runs, so both parts test it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from candidates import EDGES
from grid import Row
from survival import Ended, Fate, fates

from kilolayer.probe.forecast import FADE, LEVEL, POWER, TURN, USUAL_WARMUP

FACTORS = [10 ** (exponent / 10) for exponent in range(-60, 31)]
POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)
SHIPPED = "kilolayer forecast"
PAIRS = tuple((other, f"reached {level}") for other in ("range test", "update", "sharpness") for level in (0.03, 0.01, 0.003))


@dataclass(frozen=True)
class Case:
    """A run with its fate and its row's measurements: an edge by candidate. warmup: in steps."""

    row: Row
    lr: float
    warmup: int
    fate: Fate
    edges: dict[str, float]

    @property
    def lives(self) -> bool:
        return self.fate == "survived"


@dataclass(frozen=True)
class Rule:
    """A run survives if lr <= factor * edge for each of its edges; the last is also multiplied by (warmup /
    USUAL_WARMUP)^power."""

    factors: dict[str, float]
    power: float

    def limit(self, case: Case) -> float:
        *others, last = (factor * case.edges[name] for name, factor in self.factors.items())
        return min([*others, last * (case.warmup / USUAL_WARMUP) ** self.power])


@dataclass(frozen=True)
class Score:
    """Counts of runs: right; too_high, predicted to survive but died; too_low, predicted to die but survived."""

    right: int
    too_high: int
    too_low: int

    @property
    def text(self) -> str:
        return f"{self.right} of {self.right + self.too_high + self.too_low}"


def score(rule: Rule, cases: Iterable[Case]) -> Score:
    outcomes = [(case.lr <= rule.limit(case), case.lives) for case in cases]
    return Score(sum(a == b for a, b in outcomes), outcomes.count((True, False)), outcomes.count((False, True)))


def fit(names: Sequence[str], cases: Sequence[Case]) -> Rule:
    """The factors, and the power of the warm-up, that predict the most runs correctly; among equals, the middle."""
    powers = POWERS if len({case.warmup for case in cases}) > 1 else (0.5,)
    steps = FACTORS if len(names) == 1 else FACTORS[::2]
    found: dict[float, list[Rule]] = {}
    for power, *factors in product(powers, *[steps] * len(names)):
        rule = Rule(dict(zip(names, factors, strict=True)), power)
        found.setdefault(score(rule, cases).right, []).append(rule)
    best = found[max(found)]
    power = sorted(rule.power for rule in best)[len(best) // 2]
    best = [rule for rule in best if rule.power == power]
    middle = {name: _middle([rule.factors[name] for rule in best]) for name in names}
    return Rule(middle, power) if score(Rule(middle, power), cases).right == max(found) else best[len(best) // 2]


def _middle(factors: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, factors)) / len(factors))


def read(out: Path) -> list[Case]:
    """Every run of rows that are complete and were measured; slow runs are left out."""
    looks = {each["name"]: each for each in _lines(out / "looks.jsonl") if "error" not in each}
    rows: dict[Row, list[dict[str, Any]]] = {}
    for run in _lines(out / "runs.jsonl"):
        if "error" not in run:
            rows.setdefault(Row(**run["row"]), []).append(run)
    cases: list[Case] = []
    for row, runs in rows.items():
        if row.name not in looks or len(runs) < 3:
            continue
        edges = {name: edge(looks[row.name]) for name, edge in EDGES.items()}
        ended = [Ended(run["lr"], run["warmup"], run["loss"], last_pulse(run)) for run in runs]
        for run, fate in zip(runs, fates(ended, runs[0]["frequency_loss"]), strict=True):
            if fate != "slow":
                cases.append(Case(row, run["lr"], max(1, round(run["warmup"] * run["size"]["steps"])), fate, edges))
    return cases


def sizes(out: Path) -> list[dict[str, Any]]:
    """Width, steps, batches and vocabulary of the runs."""
    found = [run["size"] for run in _lines(out / "runs.jsonl")]
    return [size for place, size in enumerate(found) if size not in found[:place]]


def last_pulse(run: dict[str, Any]) -> float:
    """The gradient part of the weakest stack at the end: the largest of three measurements, because one batch is noisy."""
    return max(each["reached"] for each in run["pulse"][-3:])


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_score(out: Path) -> None:
    """Write results.json and results.md."""
    cases = read(out)
    parts = {part: [case for case in cases if case.row.part == part] for part in ("calibration", "held-out")}
    lines = ["| forecast | calibration, right | held-out, right | too high | too low |", "|---|---|---|---|---|"]
    rules: dict[str, Any] = {}
    candidates = {" and ".join(names): fit(names, parts["calibration"]) for names in (*((name,) for name in EDGES), *PAIRS)}
    shipped = Rule({"range test": TURN, f"reached {LEVEL:g}": FADE}, POWER)
    for label, rule in {SHIPPED: shipped, **candidates}.items():
        found = {part: score(rule, few) for part, few in parts.items()}
        recipes = sorted({case.row.recipe for case in cases})
        own = {each: [case for case in parts["held-out"] if case.row.recipe == each] for each in recipes}
        by_recipe = {recipe: vars(score(rule, few)) for recipe, few in own.items() if few}
        held = found["held-out"]
        rules[label] = {**vars(rule), **{part: vars(each) for part, each in found.items()}, "by recipe, held-out": by_recipe}
        lines.append(f"| {label} | {found['calibration'].text} | {held.text} | {held.too_high} | {held.too_low} |")
    runs = [{**vars(case), "row": vars(case.row)} for case in cases]
    document = {
        "command": "python benchmarks/forecast/forecast.py score OUT",
        "sizes": sizes(out),
        "forecasts": rules,
        "runs": runs,
    }
    (out / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / "results.md").write_text("\n".join([*lines, ""]))
    print("\n".join(lines))
