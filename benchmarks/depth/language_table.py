"""The tables and figure of language.py: loss by steps, by seconds and by FLOPs, and question answering."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from language import FALL, WIDTHS, best_runs, final_loss, state_of, wanted_of

TITLES = {"fixed": "one width", "equal": "equal weights without the tables"}
LINES = {"pre_ln": "--", "sub_ln": "-", "deepnorm": ":"}
SHARES = (0.1, 0.2, 0.4, 0.8)  # budgets, as fractions of the cost of the deepest model's run before its learning rate falls

Run = dict[str, Any]
Cost = Callable[[Run, int], float | None]
"""The cost of a run's first n steps; None if its step time was not measured."""


def write_table(document: dict[str, Any], out: Path) -> None:
    """Write OUT/language.md and OUT/language.svg."""
    runs, speed = document["runs"], document["speed"]
    costs = costs_of(speed)
    parts = [f"Language models of the books, {document.get('hardware')}. Losses: nats per token of the validation set."]
    families = [family for family in WIDTHS if len({run["layers"] for run in rows_of(family, best_runs(runs))}) > 1]
    for family in families:
        parts += [f"## {family}: {TITLES[family]}", *family_tables(family, runs, speed, costs)]
    parts += ["## Questions", *question_tables(document)] if document["shots"] else []
    (out / "language.md").write_text("\n\n".join(parts) + "\n")
    draw(families, runs, costs, out / "language.svg")
    print(out / "language.md", out / "language.svg")


def costs_of(speed: dict[str, Run]) -> dict[str, Cost]:
    def measured(key: str, factor: float) -> Cost:
        return lambda run, steps: steps * speed[run["model"]][key] * factor if key in speed.get(run["model"], {}) else None

    return {"steps": lambda _, steps: float(steps), "seconds alone": measured("ms", 1e-3), "FLOPs": measured("flops", 1.0)}


def rows_of(family: str, best: dict[str, Run]) -> list[Run]:
    """The best runs of a family, by recipe and depth."""
    own = [run for run in best.values() if WIDTHS[family][run["layers"]] == (run["dim"], run["ffn_dim"])]
    return sorted(own, key=lambda run: (list(LINES).index(run["recipe"]), run["layers"]))


def family_tables(family: str, runs: dict[str, Run], speed: dict[str, Run], costs: dict[str, Cost]) -> list[str]:
    best = rows_of(family, best_runs(runs))
    # A model that no learning rate has trained gets a row too.
    tried = rows_of(family, {run["model"]: run for run in sorted(runs.values(), key=lambda run: -run["steps"])})
    tried = [next((run for run in best if run["model"] == each["model"]), each) for each in tried]
    models = [run["model"] for run in tried]
    rates = sorted({run["rate"] for run in runs.values() if run["model"] in models})
    by_rate = [
        [run["model"], *(shown_loss(with_rate(runs, run, rate)) for rate in rates), seeds_of(runs, run)] for run in tried
    ]
    header = ["model", *(f"lr {rate:g}" for rate in rates), "best rate, all seeds"]
    parts = ["At the end of the same steps:", table(header, by_rate)]
    header = ["model", "weights", "without tables", "ms per step", "tokens/s", "TFLOPs per step", "seconds", "loss"]
    parts += ["Each model alone:", table(header, [cost_row(run, speed.get(run["model"], {})) for run in best])]
    if longer := [run for run in runs.values() if run["model"] in models and is_longer(run, best)]:
        deepest = [run for run in best if run["layers"] == max(each["layers"] for each in best)]
        parts += ["Longer runs, and the deepest ones:", table(*longer_rows([*longer, *deepest], costs))]
    for name, cost in costs.items():
        parts += best_depths(name, cost, runs, best)
    return parts


def with_rate(runs: dict[str, Run], best: Run, rate: float) -> list[Run]:
    same = ("model", "steps", "seed")
    return [run for run in runs.values() if run["rate"] == rate and all(run[key] == best[key] for key in same)]


def shown_loss(found: Sequence[Run]) -> str:
    if not found:
        return "-"
    state = state_of(found[0])
    dead = ", dead" if " dead " in found[0]["outcome"] else ""
    return f"{final_loss(found[0]):.4f}{dead}" if state == "finished" else state


def seeds_of(runs: dict[str, Run], best: Run) -> str:
    """The mean over seeds, with its standard deviation."""
    same = ("model", "steps", "rate")
    own = [run for run in runs.values() if all(run[key] == best[key] for key in same)]
    losses = [final_loss(run) for run in own if state_of(run) == "finished"]
    spread = f" ± {stdev(losses):.4f}" if len(losses) > 1 else ""
    return f"lr {best['rate']:g}: {mean(losses):.4f}{spread} ({len(losses)} of {len(own)})" if losses else "-"


def cost_row(run: Run, facts: Run) -> list[str]:
    if "ms" not in facts:
        return [run["model"], *["-"] * 6, f"{final_loss(run):.4f}"]
    return [
        run["model"],
        f"{facts['parameters'] / 1e6:.1f} M",
        f"{facts['without_tables'] / 1e6:.1f} M",
        f"{facts['ms']:.2f}",
        f"{facts['tokens_per_second']:,.0f}",
        f"{facts['flops'] / 1e12:.3g}",
        f"{run['steps'] * facts['ms'] / 1e3:.1f}",
        f"{final_loss(run):.4f}",
    ]


def is_longer(run: Run, best: Iterable[Run]) -> bool:
    return any(run["model"] == each["model"] and run["steps"] > each["steps"] for each in best)


def longer_rows(longer: list[Run], costs: dict[str, Cost]) -> tuple[list[str], list[list[str]]]:
    header = ["model", "steps", "seconds alone", "FLOPs", "loss"]
    rows = []
    for run in sorted(longer, key=lambda run: (run["recipe"], run["layers"])):
        found = [cost(run, run["steps"]) for cost in costs.values()]
        rows.append([f"{run['model']} lr {run['rate']:g}", *(short(each) for each in found), shown_loss([run])])
    return header, rows


def before_fall(run: Run) -> list[tuple[int, float]]:
    """Step and loss of the validations before the learning rate falls."""
    last = run["steps"] - round(FALL * run["steps"])
    return [(row["step"], row["loss"]) for row in run.get("valid") or [] if row["step"] <= last and row["loss"] is not None]


def points_of(model: Run, runs: dict[str, Run], cost: Cost) -> list[tuple[float, float]]:
    """Cost and loss of a model before its learning rate falls: of its best run, or the longest with the same rate and seed."""
    same = [run for run in runs.values() if all(run[name] == model[name] for name in ("model", "rate", "seed"))]
    longest = max(same, key=lambda run: run["steps"])
    found = [(cost(longest, step), loss) for step, loss in before_fall(longest)]
    return [(spent, loss) for spent, loss in found if spent is not None]


def best_depths(name: str, cost: Cost, runs: dict[str, Run], best: list[Run]) -> list[str]:
    """The loss of each depth at each budget; - if its runs were not long enough."""
    depths = sorted({run["layers"] for run in best})
    rows = []
    for recipe in dict.fromkeys(run["recipe"] for run in best):
        own = {run["layers"]: run for run in best if run["recipe"] == recipe}
        deepest = own[max(own)]
        whole = cost(deepest, deepest["steps"])
        points = {layers: points_of(run, runs, cost) for layers, run in own.items()}
        for budget in [] if whole is None else [share * whole for share in SHARES]:
            losses = [loss_within(points.get(layers, []), budget) for layers in depths]
            least = min((loss for loss in losses if loss is not None), default=math.nan)
            shown = ["-" if loss is None else f"**{loss:.4f}**" if loss == least else f"{loss:.4f}" for loss in losses]
            rows.append([recipe, short(budget), *shown])
    title = f"Before the rate falls, at equal {name}; - where no run was that long:"
    return [title, table(["recipe", name, *(f"{layers}L" for layers in depths)], rows)] if rows else []


def loss_within(points: list[tuple[float, float]], budget: float) -> float | None:
    """The loss at a budget, interpolated linearly between validations; None outside their range."""
    points = sorted(points)
    for (a, first), (b, second) in pairwise(points):
        if a <= budget <= b:
            return first if a == b else first + (second - first) * (budget - a) / (b - a)
    return points[-1][1] if points and math.isclose(points[-1][0], budget, rel_tol=1e-6) else None


def question_tables(document: dict[str, Any]) -> list[str]:
    """Accuracy in percent, by set and shots, with the standard error; a tilde marks values within two of them of chance."""
    asked = {name: found for name, found in document["shots"].items() if isinstance(found, list)}
    missed = [f"{name}: {' '.join(found['told'])}" for name, found in document["shots"].items() if isinstance(found, dict)]
    kinds = {(each["task"], each["norm"]): each for found in asked.values() for each in found if each["metric"] == "accuracy"}
    parts = ["Percent, ± the standard error; ~: within two standard errors of chance.", *missed]
    for (task, norm), example in kinds.items():
        shots = sorted({each["shots"] for found in asked.values() for each in found if each["task"] == task})
        chance = "nothing to choose from" if example["chance"] is None else f"chance {100 * example['chance']:.1f}"
        header = [f"{task}, norm {norm}, {example['questions']} questions, {chance}", *(f"{count} shots" for count in shots)]
        rows = []
        for name, found in sorted(asked.items(), key=lambda pair: rank_of(document["runs"][pair[0]])):
            by_shots = {each["shots"]: each for each in found if (each["task"], each["norm"]) == (task, norm)}
            cells = [accuracy(by_shots[count]) if count in by_shots else "-" for count in shots]
            rows.append([wanted_of(document["runs"][name]).model, *cells])
        parts.append(table(header, rows))
    return parts


def rank_of(run: Run) -> tuple[int, int, int]:
    return list(LINES).index(run["recipe"]), run["layers"], run["dim"]


def accuracy(score: Run) -> str:
    value, error, chance = score["value"], score["standard_error"] or 0.0, score["chance"]
    mark = "~" if chance is not None and abs(value - chance) <= 2 * error else ""
    return f"{mark}{100 * value:.1f} ± {100 * error:.1f}"


def draw(families: list[str], runs: dict[str, Run], costs: dict[str, Cost], path: Path) -> None:
    """One row of panels per family: loss by steps, seconds and FLOPs, of each model's best run and its longer ones."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    mpl.rcParams["svg.hashsalt"] = "kilolayer"  # for reproducible SVG ids
    size = (13, 4 * max(1, len(families)))
    figure, panels = plt.subplots(max(1, len(families)), 3, figsize=size, layout="constrained", squeeze=False, sharey=True)
    colours = {layers: f"C{index}" for index, layers in enumerate(WIDTHS["fixed"])}
    lowest, highest = math.inf, -math.inf
    for family, row in zip(families, panels, strict=False):
        best = rows_of(family, best_runs(runs))
        for (name, cost), panel in zip(costs.items(), row, strict=True):
            for run in best:
                for each in [run, *(other for other in runs.values() if is_longer(other, [run]) and other.get("valid"))]:
                    rows = [(cost(each, point["step"]), point["loss"]) for point in each["valid"] if point["loss"] is not None]
                    if not rows or rows[0][0] is None:
                        continue
                    label = f"{run['layers']}L d{run['dim']} {run['recipe']}" if each is run else None
                    style = {"linestyle": LINES[run["recipe"]], "color": colours[run["layers"]]}
                    panel.plot(*zip(*rows, strict=True), linewidth=1.2 if each is run else 0.7, label=label, **style)
                    lowest, highest = min(lowest, rows[-1][1]), max(highest, rows[len(rows) // 5][1])
            panel.set(xlabel=name, xscale="log")
            panel.xaxis.set_minor_formatter(NullFormatter())
        row[0].set_ylabel(f"{family}: validation loss")
        row[0].legend(frameon=False, fontsize=7, loc="upper right")
    if lowest < highest:
        panels[0][0].set_ylim(lowest - 0.05 * (highest - lowest), highest + 0.05 * (highest - lowest))
    figure.savefig(path, metadata={"Date": None})


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 or value >= 1e6 else f"{value:,.0f}"
