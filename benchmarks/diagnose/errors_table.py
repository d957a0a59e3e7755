"""Count how often the rules of `kilolayer diagnose` are right: writes errors.json and errors.md.

python benchmarks/diagnose/errors_table.py [MEASURED.jsonl]     # from the measurements of errors.py, or again from errors.json

The labels are those that the runs got at their end: in benchmarks/dead, and in benchmarks/reproduce/deepnet-table1.json, where
a method at a depth is a series, measured with seed 1. A run lives if it finished, and has failed if it is dead, did not read
its source, or diverged. Runs without progress, most of which were only slow, count as neither.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[1] / "dead"))

from table import FIT, RUNS, TABLE1, every_run

from kilolayer.evaluate.source_use import SOURCE_READ
from kilolayer.evaluate.stack_label import MOVED
from kilolayer.probe.verdict import ALIKE, EXPLODED, FLAT, GROWN, IDLE, NARROW, VANISHED

HERE = Path(__file__).parent
RESULTS, VANISHING = HERE / "errors.json", HERE / "vanishing.json"
LABELS = ("finished", "dead", "source_not_read", "diverged", "no_progress")
FAILED = LABELS[1:4]
MOMENTS = {"start": "before training", "half": "after half of the steps", "end": "at the end"}
PARTS, SHARES = (0.1, 0.25, 0.5, 0.75), (1e-2, 1e-3, 1e-4)
"""Fractions of the steps at which a gradient that fades is looked at, and shares of the largest layer's."""
Stack = dict[str, Any]
Case = dict[str, Any]
"""A run: its series, set, task, label, the stacks that are dead at its end, and what was measured of its stacks."""


@dataclass(frozen=True)
class Measure:
    """One number of a stack, of which the worst stack counts. beyond: on which side of a limit a fault is.

    kind, limit: of the finding that it makes; no limit if no rule judges it.
    """

    name: str
    of: Callable[[Stack], float | None]
    beyond: Literal["below", "above"]
    kind: str = ""
    limit: float | None = None
    moments: tuple[str, ...] = tuple(MOMENTS)

    def value(self, stacks: dict[str, Stack]) -> float | None:
        """The worst of a model's stacks; None if none has this number."""
        known = [value for stack in stacks.values() if (value := self.of(stack)) is not None]
        return (min if self.beyond == "below" else max)(known, default=None)

    def fires(self, stacks: dict[str, Stack], limit: float | None = None) -> bool:
        value, limit = self.value(stacks), self.limit if limit is None else limit
        if value is None or limit is None:
            return False
        return value < limit if self.beyond == "below" else value > limit


def _of_attention(stack: Stack) -> float | None:
    return min((values[1] for values in stack["entropy"].values() if values), default=None)


def _collapsed(stack: Stack) -> float | None:
    """The effective rank of the states over their width, where their cosine is above its limit."""
    return (stack["rank"] if stack["cosine"] > ALIKE else 1.0) if None not in (stack["cosine"], stack["rank"]) else None


def _backwards(stack: Stack) -> float | None:
    """The gradient of the last layer over the largest, where the first layers have most of it."""
    return 1.0 if stack["first"] is not None and stack["first"] <= 0.5 else stack["last"]


START = ("start",)
MEASURES = (
    Measure("first layers' gradient", lambda stack: stack["first"], "below", "vanishing gradient", VANISHED, START),
    Measure("last layer's gradient", _backwards, "below", "exploding gradient", 1 / EXPLODED, START),
    Measure("gradient over eps", lambda stack: stack["over_eps"] or None, "below", "eps", MOVED),
    Measure(f"rank over width, if the cosine is above {ALIKE:g}", _collapsed, "below", "collapsed states", FLAT),
    Measure("cosine of the states", lambda stack: stack["cosine"], "above"),
    Measure("rank of the states over their width", lambda stack: stack["rank"], "below"),
    Measure("growth of the residual", lambda stack: stack["growth"], "above", "residual growth", GROWN),
    Measure("entropy of attention", _of_attention, "below", "narrow attention", NARROW),
    Measure("dead ReLUs, worst layer", lambda stack: stack["idle"][0] if stack["idle"] else None, "above", "dead ReLUs", IDLE),
    Measure("dead ReLUs, mean", lambda stack: stack["idle"][1] if stack["idle"] else None, "above"),
    Measure(
        "first layers' gradient, of the model's largest",
        lambda stack: stack["reached"],
        "below",
        "fading",
        1e-2,
        ("half", "end"),
    ),
)


@cache
def labelled() -> dict[str, Case]:
    """All runs with a label, by name."""
    series = [run | {"series": int(run["name"].split()[0])} for run in json.loads(RUNS.read_text())["runs"]]
    return {run["name"]: run for run in [*series, *table1_runs()]}


def table1_runs() -> Iterator[Case]:
    """The runs of deepnet-table1, as a task of its own: its models are wider, and its text is another."""
    document = json.loads(TABLE1.read_text())
    found = document["found"]
    for run in [*found["runs"], *found["not_chosen"], *document.get("not_asked", [])]:
        if run["outcome"] in ("waiting", "unfinished"):
            continue
        unread = run["outcome"] == "finished" and run["source_gain"] is not None and run["source_gain"] < SOURCE_READ
        cell = cell_of(run["options"])
        yield {
            "name": f"table1 {run['name']}",
            "series": cell,
            "set": "fit" if cell.split()[1] in FIT else "test",
            "task": "table1",
            "dim": 128,
            "label": "source_not_read" if unread else run["outcome"],
        }


def cell_of(options: dict[str, Any]) -> str:
    """The name of a method at a depth."""
    recipe = options["model.recipe"]
    return f"table1 {recipe if isinstance(recipe, str) else recipe['name']} {options['layers']}L"


def cases(document: dict[str, Any], moment: str) -> list[Case]:
    """The runs of which there is a measurement at this moment; before training, one serves all runs of a series."""
    runs = labelled()
    if moment == "start":
        starts = {row.get("series", row["name"]): row["start"]["stacks"] for row in document["starts"]}
        return [_case(run, starts[run["series"]]) for run in runs.values() if run["series"] in starts]
    return [_case(runs[row["name"]], row[moment]["stacks"]) for row in document["trained"] if moment in row]


def _case(run: Case, stacks: dict[str, Stack]) -> Case:
    """A run with its measured stacks, whose rank is a share of the width."""
    shares = {side: stack | {"rank": stack["rank"] and stack["rank"] / run["dim"]} for side, stack in stacks.items()}
    return run | {"measured": shares}


def bound(count: int, of: int) -> float:
    """The upper end of the exact one-sided 95% interval (Clopper and Pearson) for a share that was `count` of `of`."""
    if count == of:
        return 1.0
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        as_few = sum(math.comb(of, k) * middle**k * (1 - middle) ** (of - k) for k in range(count + 1))
        low, high = (middle, high) if as_few > 0.05 else (low, middle)
    return high


def area(measure: Measure, runs: Sequence[Case]) -> float | None:
    """The area under the ROC curve: how often a run that failed is worse than one of the same task that lives."""
    sign = -1 if measure.beyond == "below" else 1
    values = [(run["task"], run["label"], value) for run in runs if (value := measure.value(run["measured"])) is not None]
    pairs = [
        (sign * bad > sign * good) + (bad == good) / 2
        for of, label, bad in values
        if label in FAILED
        for task, lived, good in values
        if lived == "finished" and task == of
    ]
    return sum(pairs) / len(pairs) if pairs else None


def right(measure: Measure, runs: Iterable[Case], limit: float) -> int:
    """How many runs a limit judges rightly: it fires on those that failed, and not on those that live."""
    return sum(measure.fires(run["measured"], limit) == (run["label"] in FAILED) for run in runs)


def best_limit(measure: Measure, runs: Sequence[Case]) -> float:
    """The limit that judges most of the runs rightly; one that never fires, if none does better."""
    values = {value for run in runs if (value := measure.value(run["measured"])) is not None}
    never = -math.inf if measure.beyond == "below" else math.inf
    return max((never, *sorted(values)), key=lambda limit: right(measure, runs, limit))


def judged(runs: Iterable[Case]) -> list[Case]:
    return [run for run in runs if run["label"] == "finished" or run["label"] in FAILED]


def by_series(runs: Iterable[Case]) -> list[list[Case]]:
    """The runs of each series."""
    found: dict[int | str, list[Case]] = {}
    for run in runs:
        found.setdefault(run["series"], []).append(run)
    return list(found.values())


def errors(measure: Measure, runs: Sequence[Case]) -> dict[str, Any]:
    """How often the rule fired, on which labels, and on how many series that live at some rate, and on how many others."""
    fired = [run for run in runs if measure.fires(run["measured"])]
    hit = {run["series"] for run in fired}
    series = by_series(judged(runs))
    alive = [own for own in series if any(run["label"] == "finished" for run in own)]
    lost = [own for own in series if own not in alive]
    fit, test = ([run for run in judged(runs) if run["set"] == name] for name in ("fit", "test"))
    limit = best_limit(measure, fit)
    return {
        "fired": len(fired),
        "by_label": {label: sum(run["label"] == label for run in fired) for label in LABELS},
        "of": {label: sum(run["label"] == label for run in runs) for label in LABELS},
        "series_alive": [sum(own[0]["series"] in hit for own in alive), len(alive)],
        "series_lost": [sum(own[0]["series"] in hit for own in lost), len(lost)],
        "area": area(measure, runs),
        "best_limit": limit if math.isfinite(limit) else None,
        "right_by_best": right(measure, test, limit),
        "right_by_limit": None if measure.limit is None else right(measure, test, measure.limit),
        "right_by_lives": sum(run["label"] == "finished" for run in test),
        "test": len(test),
    }


def faded(part: float, level: float) -> dict[str, int]:
    """The runs whose weakest stack got less than `level` at the last check in this part of the steps, by their label."""
    runs = [run for run in every_run() if _reached(run, part) < level]
    return {"seen": len(runs)} | {label: sum(run["label"] == label for run in runs) for label in LABELS}


def _reached(run: dict[str, Any], part: float) -> float:
    checks = [[reached for step, reached in own if step <= part * run["steps"]] for own in run["stacks"].values()]
    return min((own[-1] for own in checks if own), default=math.inf)


def records(document: dict[str, Any], moment: str) -> dict[str, list[int]]:
    """All runs, and those that had a finding, or none before training: how many of each failed, and how many live."""
    runs = cases(document, moment)
    rules = [each for each in MEASURES if each.kind not in ("", "fading") and moment in each.moments]
    found = {rule.kind: _record(run for run in runs if rule.fires(run["measured"])) for rule in rules}
    if moment == "start":
        found["none"] = _record(run for run in runs if not any(rule.fires(run["measured"]) for rule in rules))
        both = zip(found["vanishing gradient"], _record(vanished()), strict=True)
        found["vanishing gradient"] = [here + there for here, there in both]
    return {"all": _record(runs), **found}


def vanished() -> list[Case]:
    """The runs of vanishing.json that began below the limit."""
    document = json.loads(VANISHING.read_text())
    first = {row["series"]: row["first"] for row in document["before"].values()}
    return [run for run in document["runs"].values() if first[run["series"]] < VANISHED]


def _record(runs: Iterable[Case]) -> list[int]:
    labels = [run["label"] for run in runs]
    return [len(labels), sum(label in FAILED for label in labels), labels.count("finished")]


def dead_encoders() -> dict[str, int]:
    """The translators with a dead encoder, and how many of these did not read their source."""
    gains = [run["source_gain"] for run in every_run() if run["task"] == "translation" and "encoder" in run["dead"]]
    return {"seen": len(gains), "source_not_read": sum(gain < SOURCE_READ for gain in gains if gain is not None)}


def slower() -> dict[str, int]:
    """The dead runs of series that have a run at a quarter of the rate, and how many of those are not dead, and live."""
    runs = [run for run in labelled().values() if run["task"] != "table1"]
    rates = {(run["series"], float(f"{run['lr']:.3g}")): run for run in runs}
    quarters = [rates.get((run["series"], float(f"{run['lr'] / 4:.3g}"))) for run in runs if run["label"] == "dead"]
    known = [run for run in quarters if run is not None]
    live = sum(run["label"] == "finished" for run in known)
    return {"seen": len(known), "not_dead": sum(not run["dead"] for run in known), "live": live}


def _share(part: int, of: int) -> str:
    return f"{part} of {of}"


def _number(value: float | None) -> str:
    return "never" if value is None else f"{value:.3g}"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _head(*cells: str) -> list[str]:
    return [_row(*cells), f"|{'---|' * len(cells)}"]


def _wrong(count: int, of: int) -> str:
    return f"{count} of {of} (at most {bound(count, of):.1%})"


def rule_rows(document: dict[str, Any], moment: str) -> Iterator[str]:
    """For each rule at a moment: where it fired."""
    columns = ("fired", "of these failed", "no progress", "wrong calls, of those that live", "found, of the dead")
    yield from _head("finding", "measurement", "a fault", *columns)
    for rule in (each for each in MEASURES if each.kind and moment in each.moments):
        found = document["errors"][moment][rule.name]
        own, of = found["by_label"], found["of"]
        fault = f"{rule.beyond} {_number(rule.limit)}"
        failed, wrong = sum(own[name] for name in FAILED), _wrong(own["finished"], of["finished"])
        counts = (found["fired"], failed, own["no_progress"], wrong, _share(own["dead"], of["dead"]))
        yield _row(rule.kind, rule.name, fault, *counts)


def limit_rows(document: dict[str, Any], moment: str) -> Iterator[str]:
    """For each measurement: the limit that does best on the fit set, and both limits on the test set."""
    right = ("right by it, test set", "right by the rule's limit", "right by always saying that it lives")
    yield from _head("measurement", "AUC", "best limit on the fit set", *right)
    for measure in (each for each in MEASURES if moment in each.moments):
        found = document["errors"][moment][measure.name]
        auc = "-" if found["area"] is None else f"{found['area']:.2f}"
        own = "-" if found["right_by_limit"] is None else found["right_by_limit"]
        best = _share(found["right_by_best"], found["test"])
        yield _row(measure.name, auc, _number(found["best_limit"]), best, own, found["right_by_lives"])


def series_rows(document: dict[str, Any]) -> Iterator[str]:
    """For each rule before training: on how many series it fired."""
    yield from _head("finding", "series that live at some rate: fired", "series that fail and never live: fired")
    for rule in (each for each in MEASURES if each.kind and "start" in each.moments):
        found = document["errors"]["start"][rule.name]
        yield _row(rule.kind, _wrong(*found["series_alive"]), _share(*found["series_lost"]))


def markdown(document: dict[str, Any]) -> str:
    lines = [
        "# How often a diagnosis is right",
        "",
        "Measurements of `kilolayer diagnose` on runs whose label at the end is known. Failed: dead, source not read, or",
        "diverged. The bound is the exact one-sided 95% bound, as if runs were independent; those of a series are related.",
        "AUC: how often a run that failed is worse than one of the same task that lives. Fit and test set differ in series.",
    ]
    for moment, title in MOMENTS.items():
        runs = cases(document, moment)
        labels = (f"{sum(run['label'] == label for run in runs)} {label.replace('_', ' ')}" for label in LABELS)
        about = f"{len(runs)} runs of {len(by_series(runs))} series: {', '.join(labels)}."
        lines += ["", f"## {title.capitalize()}", "", about, "", *rule_rows(document, moment), ""]
        lines += limit_rows(document, moment)
        if moment == "start":
            lines += ["", "By series, which has one measurement for all its learning rates:", "", *series_rows(document)]
    lines += [
        "",
        "## A gradient that fades",
        "",
        "All runs of benchmarks/dead/table.md, by the last check in a part of their steps: the running gradient of the weakest",
        "stack's first layers over the model's largest.",
        "",
        *_head("part of the steps", "below", "runs", "dead", "source not read", "diverged", "no progress", "live"),
    ]
    for row in document["faded"]:
        lines.append(_row(row["part"], f"{row['below']:g}", row["seen"], *(row[name] for name in (*LABELS[1:], LABELS[0]))))
    dead, slow = document["dead_encoders"], document["slower"]
    lines += ["", f"Of {dead['seen']} translators with a dead encoder, {dead['source_not_read']} did not read their source."]
    lines += [
        f"At a quarter of the rate, {slow['not_dead']} of {slow['seen']} dead runs are not dead, and {slow['live']} live."
    ]
    return "\n".join(lines) + "\n"


def computed(document: dict[str, Any]) -> dict[str, Any]:
    """What follows from the measurements."""
    return {
        "errors": {
            moment: {each.name: errors(each, cases(document, moment)) for each in MEASURES if moment in each.moments}
            for moment in MOMENTS
        },
        "records": {moment: records(document, moment) for moment in MOMENTS},
        "faded": [{"part": part, "below": level, **faded(part, level)} for part in PARTS for level in SHARES],
        "dead_encoders": dead_encoders(),
        "slower": slower(),
    }


def main() -> None:
    if len(sys.argv) > 1:
        rows = sorted((json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()), key=lambda row: row["name"])
        starts = [row for row in rows if row["kind"] != "trained"]
        trained = [row for row in rows if row["kind"] == "trained"]
    else:
        document = json.loads(RESULTS.read_text())
        starts, trained = document["starts"], document["trained"]
    measured = {"starts": starts, "trained": trained}
    about = {
        "command": "python benchmarks/diagnose/errors.py WORK; python benchmarks/diagnose/errors_table.py WORK/measured.jsonl",
        "hardware": "one CPU core",
        "torch": "2.13.0",
        **computed(measured),
    }
    parts = [f' "{name}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in own) + "\n ]" for name, own in measured.items()]
    RESULTS.write_text(json.dumps(about, indent=1)[:-2] + ",\n" + ",\n".join(parts) + "\n}\n")
    (HERE / "errors.md").write_text(markdown(about | measured))


if __name__ == "__main__":
    main()
