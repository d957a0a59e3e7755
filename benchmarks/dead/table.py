"""Label the runs, fit the rule about dying stacks on one set, count its errors on the other: writes runs.json and table.md.

python benchmarks/dead/table.py [RUNS.jsonl] [--images RUNS.jsonl]      # from the runs of train.py, or again from runs.json

The runs are those of design.py; those of benchmarks/reproduce/deepnet-table1.json that recorded their stacks, of which the
methods of FIT are for fitting; and in the test set those of deepnorm.json, DeepNorm 50L-50L as in that table, in fp32 and
eagerly, and those of admin-figure2, admin-table4 and admin-checks. The label of a run is the outcome that a comparison gives it
(kilolayer.compare.outcome), from its end alone. Those of image classifiers are in images.json; the rule is only tried on them.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from kilolayer.compare.outcome import outcome_of
from kilolayer.evaluate.source_use import SOURCE_READ
from kilolayer.evaluate.stack_label import DEAD, DYING, FEWEST, LEVELS, SHARE, checks_of, dead_stacks
from kilolayer.report.record import Record

HERE = Path(__file__).parent
IMAGES = HERE / "images.json"
RUNS, DEEPNORM, TABLE1 = HERE / "runs.json", HERE / "deepnorm.json", HERE.parent / "reproduce" / "deepnet-table1.json"
KEPT = ("name", "set", "task", "recipe", "layers", "dim", "lr", "warmup", "eps", "seed", "steps", "source_gain")
FIT, ADMIN_LR = ("admin", "ds_init", "normformer"), 7e-4
Rule = tuple[tuple[float, float], ...]
"""A stack is dying once every check over a window (a fraction of the steps) was below a share of the gradient, for any pair."""
WINDOWS, SHARES = (0.03, 0.05, 0.1, 0.15, 0.2), (3e-4, 2e-4, 1.5e-4, 1e-4, 7e-5, 5e-5, 3e-5, 2e-5, 1e-5)
CLAUSES = list(product(WINDOWS, SHARES))
RULES: list[Rule] = [(clause,) for clause in CLAUSES] + [
    (short, long) for short, long in product(CLAUSES, CLAUSES) if short[0] < long[0] and short[1] < long[1]
]
Run = dict[str, Any]


def labelled(run: Run) -> Run:
    """A run of train.py with its label, and the stacks that are dead at its end."""
    rows = [
        {"step": step, side: {"reached": reached, "moved": moved}}
        for side, own in run["checks"].items()
        for step, reached, moved in own
    ]
    window = run["steps"] // 20
    record = Record(
        run["name"],
        config={"train": {"lr": run["lr"]}},
        train=[{"step": window * index, "nll": loss} for index, loss in enumerate(run["losses"], 1)],
        stacks=sorted(rows, key=lambda row: row["step"]),
        reference=[{"frequency_loss": run["frequency_loss"]}] if run["frequency_loss"] else [],
        scores={"test": {}},
    )
    label = outcome_of(record).kind if run["finished"] else "diverged"
    if label == "finished" and run["source_gain"] is not None and run["source_gain"] < SOURCE_READ:
        label = "source_not_read"
    dead = [each.side for each in dead_stacks(checks_of(record.stacks), run["lr"])] if run["finished"] else []
    stacks = {side: [(step, reached) for step, reached, _ in own] for side, own in run["checks"].items()}
    return {**{name: run[name] for name in KEPT}, "label": label, "dead": dead, "stacks": stacks}


def translators() -> Iterable[Run]:
    """The runs of deepnet-table1 that recorded their stacks, and those of deepnorm.json."""
    document, others = json.loads(TABLE1.read_text()), json.loads(DEEPNORM.read_text())
    found = document["found"]
    for run in found["runs"] + found["not_chosen"] + document.get("not_asked", []) + others["runs"]:
        if run.get("stacks") and run["outcome"] != "unfinished":
            recipe, options = run["options"]["model.recipe"], run["options"]
            name = recipe if isinstance(recipe, str) else recipe["name"]
            own = {"recipe": name, "layers": options["layers"], "lr": options["train.lr"], "steps": 1000}
            yield reproduced(run, f"128 {run['name']}", "fit" if name in FIT else "test", own)


def of_admin() -> Iterable[Run]:
    """The runs of Very Deep Transformers: RAdam, 4,000 or 8,000 steps, encoders of up to 60 layers; none was for fitting."""
    read = [
        json.loads((TABLE1.parent / f"{name}.json").read_text()) for name in ("admin-figure2", "admin-table4", "admin-checks")
    ]
    figure, table, checks = read
    groups = [
        *(("figure2", ADMIN_LR, runs) for runs in figure["found"].values()),
        ("table4 backward", ADMIN_LR, [table["found"]["backward"]]),
        *((f"table4 {name}", ADMIN_LR, runs) for name, runs in table["found"]["forward"].items()),
        ("longer", ADMIN_LR, checks["runs"]["longer"]),
        ("faster", 2 * ADMIN_LR, checks["runs"]["faster"]),
    ]
    for group, lr, runs in groups:
        for run in runs:
            recipe = run["options"].get("model.recipe", {"name": "admin" if "deep" in group else "post_ln"})["name"]
            deeper = max(map(int, str(run["options"]["layers"]).split("-")))
            own = {"recipe": recipe, "layers": deeper, "lr": lr, "steps": run["valid"][-1][0]}
            yield reproduced(run, f"admin {group} {run['name']}", "test", own)


def reproduced(run: Run, name: str, part: str, own: Run) -> Run:
    """A run of a reproduction, as those of train.py are here; own: what its options are called there."""
    rows = [{"step": step, side: {"reached": reached}} for side, each in run["stacks"].items() for step, reached in each]
    return {
        "name": name,
        "set": part,
        "task": "translation",
        "dim": 128,
        "warmup": 0.4,
        "eps": 1e-8,
        "seed": run["options"]["train.seed"],
        **own,
        "source_gain": run["source_gain"],
        "label": run["outcome"],
        "dead": [each.side for each in dead_stacks(checks_of(rows), own["lr"])],
        "stacks": run["stacks"],
    }


def every_run() -> list[Run]:
    """The runs of all sources."""
    return [*json.loads(RUNS.read_text())["runs"], *translators(), *of_admin()]


def called(run: Run, rule: Rule = DYING) -> int | None:
    """The step at which the rule calls a stack of the run dying; None if it never does."""
    found = [_below(own, window * run["steps"], share) for own in run["stacks"].values() for window, share in rule]
    return min((step for step in found if step is not None), default=None)


def _below(checks: Sequence[tuple[int, float]], window: float, share: float) -> int | None:
    since, count = None, 0
    for step, reached in checks:
        since, count = (since or step, count + 1) if reached < share else (None, 0)
        if since is not None and count >= FEWEST and step - since >= window:
            return step
    return None


def living(runs: Iterable[Run]) -> list[Run]:
    return [run for run in runs if run["label"] == "finished"]


def died(runs: Iterable[Run]) -> list[Run]:
    return [run for run in runs if run["dead"]]


def errors(runs: Sequence[Run], rule: Rule = DYING) -> tuple[int, int, int]:
    """How many living runs are called dying; how many dead ones are; and how many of these in the first half of their steps."""
    steps = [(called(run, rule), run["steps"]) for run in died(runs)]
    return (
        sum(called(run, rule) is not None for run in living(runs)),
        sum(step is not None for step, _ in steps),
        sum(step is not None and step <= of / 2 for step, of in steps),
    )


def best_rules(runs: Sequence[Run]) -> list[Rule]:
    """The rules that call no living run: first those that find most dead ones in the first half, then the earliest."""

    def value(rule: Rule) -> tuple[int, float]:
        when = [(called(run, rule) or run["steps"]) / run["steps"] for run in died(runs)]
        return -errors(runs, rule)[2], fmean(when)

    return sorted((rule for rule in RULES if not errors(living(runs), rule)[0]), key=value)


def low_at(run: Run, share: float, until: float) -> bool:
    """Whether a stack of the run was below a share of the gradient within this fraction of its steps."""
    return any(reached < share and step <= until * run["steps"] for own in run["stacks"].values() for step, reached in own)


def levels(runs: Sequence[Run]) -> list[tuple[float, int, int, int]]:
    """For each of LEVELS: its share, the runs seen below it, and how many of these had no dead stack at the end, and live."""
    ended = [run for run in runs if run["label"] != "diverged"]
    seen = {level.share: [run for run in ended if low_at(run, level.share, 1 - SHARE)] for level in LEVELS}
    return [(share, len(own), sum(not run["dead"] for run in own), len(living(own))) for share, own in seen.items()]


def bound(count: int) -> float:
    """The upper end of the one-sided 95% interval for a share that was 0 of `count`."""
    return 1 - 0.05 ** (1 / count)


def text_of(rule: Rule) -> str:
    return " or ".join(f"{share:g} for {window:.0%}" for window, share in rule)


def _columns(name: str, runs: Sequence[Run]) -> str:
    return f"{name}: of {len(living(runs))} living | of {len(died(runs))} dead | in the first half"


def image_runs() -> list[Run]:
    """The runs of image classifiers."""
    return json.loads(IMAGES.read_text())["runs"]


def markdown(runs: Sequence[Run], images: Sequence[Run]) -> str:
    fit, test = ([run for run in runs if run["set"] == name] for name in ("fit", "test"))
    wrong, found, early = errors(test)
    dead, alive = died(test), living(test)
    late = [run for run in dead if not low_at(run, DEAD, 0.5)]
    lines = [
        "# Dead stacks: labels, and the rule on the way",
        "",
        f"{len(runs)} runs that went to their end: {len(fit)} for fitting and {len(test)} for the test, in series of their",
        "own. A stack is dead if its first tenth of layers gets less than 1e-4 of the largest layer's gradient over the last",
        "tenth of the steps. A rule calls a stack dying once every check over a window of the steps is below a share of the",
        "gradient.",
        "",
        "| label at the end | fit | test |",
        "|---|---|---|",
    ]
    counts = [Counter(run["label"] for run in own) for own in (fit, test)]
    lines += [f"| {label} | {counts[0][label]} | {counts[1][label]} |" for label in sorted(counts[0] | counts[1])]
    lines += [
        "",
        f"The rule in use: below {text_of(DYING)} of the steps.",
        "",
        "| test set | runs | called dying |",
        "|---|---|---|",
        f"| living (finished, and read its source) | {len(alive)} | {wrong} (95% bound {bound(len(alive)):.1%}) |",
        f"| dead | {len(dead)} | {found}, {early} of them in the first half of the run |",
        f"| dead, and never below 1e-4 in the first half | {len(late)} | |",
        "",
        *_seen_below(runs, "runs of both sets"),
        "",
        f"Of {len(RULES)} rules, the best ten on the runs for fitting (none calls a living run of them), and some simple ones:",
        "living runs called dying, dead ones, and dead ones in the first half of the run.",
        "",
        f"| below | {_columns('fit', fit)} | {_columns('test', test)} |",
        "|---|---|---|---|---|---|---|",
    ]
    simple: list[Rule] = [((window, share),) for window in (0.05, 0.1) for share in (3e-4, 1e-4, 3e-5)]
    for rule in best_rules(fit)[:10] + simple:
        lines.append(f"| {text_of(rule)} | {' | '.join(map(str, (*errors(fit, rule), *errors(test, rule))))} |")
    return "\n".join([*lines, *_of_images(images)]) + "\n"


def _of_images(runs: Sequence[Run]) -> list[str]:
    wrong, found, early = errors(runs)
    alive, dead = living(runs), died(runs)
    return [
        "",
        "## Image classifiers",
        "",
        f"{len(runs)} runs on CIFAR-10, none of which was for fitting.",
        "",
        "| label at the end | runs |",
        "|---|---|",
        *(f"| {label} | {count} |" for label, count in sorted(Counter(run["label"] for run in runs).items())),
        "",
        "| | runs | called dying |",
        "|---|---|---|",
        f"| living | {len(alive)} | {wrong} (95% bound {bound(len(alive)):.1%}) |",
        f"| dead | {len(dead)} | {found}, {early} of them in the first half of the run |",
        "",
        *_seen_below(runs, "runs"),
    ]


def _seen_below(runs: Sequence[Run], title: str) -> list[str]:
    rows = [f"| {share:g} | {seen} | {recovered} | {learned} |" for share, seen, recovered, learned in levels(runs)]
    return [f"| a stack was seen below | {title} | not dead at the end | living |", "|---|---|---|---|", *rows]


def keep(trained: Path, kept: Path, options: str = "") -> None:
    """Label the runs of train.py, and write them to a file of results. options: those that they were trained with."""
    rows = [json.loads(line) for line in trained.read_text().splitlines()]
    runs = [labelled(run) for run in sorted(rows, key=lambda run: run["name"]) if "error" not in run]
    about = {"command": f"python benchmarks/dead/train.py WORK{options}", "hardware": "two CPU cores", "torch": "2.13.0"}
    text = json.dumps(about, indent=1)[:-2] + ',\n "runs": [\n' + ",\n".join(f"  {json.dumps(run)}" for run in runs)
    kept.write_text(text + "\n ]\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?")
    parser.add_argument("--images", type=Path)
    options = parser.parse_args()
    if options.runs is not None:
        keep(options.runs, RUNS)
    if options.images is not None:
        keep(options.images, IMAGES, " --images")
    (HERE / "table.md").write_text(markdown(every_run(), image_runs()))


if __name__ == "__main__":
    main()
