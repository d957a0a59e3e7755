"""Methods by depth and learning rate, and what is known of dying stacks."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterable
from functools import cache
from statistics import fmean
from typing import Any

from kilolayer.evaluate.stack_label import DEAD, DYING, as_fraction
from tests.derivations.section import ROOT, SHOWN, Data, Pieces, both_sides, listed, rate, row, section, word

OPEN = ("waiting", "unfinished")


class MethodsByDepth:
    """The runs of deepnet-table1."""

    def __init__(self, document: Data) -> None:
        found = document["found"]
        self.chosen: list[Data] = found["runs"]
        self.runs: list[Data] = [*found["runs"], *found["not_chosen"], *document.get("not_asked", [])]
        self.methods = list(dict.fromkeys(map(self.method, self.chosen)))
        self.depths = sorted({run["options"]["layers"] for run in self.chosen})

    @staticmethod
    def method(run: Data) -> str:
        recipe = run["options"]["model.recipe"]
        return recipe if isinstance(recipe, str) else recipe["name"]

    def of(self, runs: Iterable[Data], method: str, layers: int, lr: float | None = None) -> list[Data]:
        """By seed, without those that have not been trained to their end."""
        own = [run for run in runs if self.method(run) == method and run["options"]["layers"] == layers]
        own = [run for run in own if run["outcome"] not in OPEN and lr in (None, run["options"]["train.lr"])]
        return sorted(own, key=lambda run: run["options"]["train.seed"])

    def at(self, method: str, layers: int, lr: float) -> list[Data]:
        return self.of(self.runs, method, layers, lr)

    def best(self, method: str, layers: int) -> list[Data]:
        """The runs at the chosen rate; none while a run of the cell is still to be trained to its end."""
        own = [run for run in self.chosen if self.method(run) == method and run["options"]["layers"] == layers]
        return [] if any(run["outcome"] in OPEN for run in own) else own

    def mean(self, name: str, method: str, layers: int, lr: float | None = None) -> float:
        """The mean of the seeds at a rate, or at the chosen one."""
        return fmean(run[name] for run in (self.best(method, layers) if lr is None else self.at(method, layers, lr)))

    def cell(self, method: str, layers: int) -> str:
        """Loss and BLEU at the chosen rate; the outcome, if a seed did not live; - if it is not known."""
        runs = self.best(method, layers)
        if not runs:
            return "-"
        chosen = rate(runs[0]["options"]["train.lr"])
        if dead := [run for run in runs if run["outcome"] != "finished"]:
            return f"{dead[0]['outcome']} in {word(len(dead))} of {word(len(runs))} seeds ({chosen})"
        return f"{self.mean('loss', method, layers):.3f}, {self.mean('bleu', method, layers):.1f} ({chosen})"

    def rows(self) -> Pieces:
        """The methods of which a cell is known."""
        yield row("", *map(both_sides, self.depths))
        for method in self.methods:
            cells = [self.cell(method, layers) for layers in self.depths]
            if set(cells) != {"-"}:
                yield row(SHOWN[method], *cells)

    def first(self, method: str, lr: float) -> str:
        """The losses of the first seed at every depth."""
        return listed(f"{self.at(method, layers, lr)[0]['loss']:.2f}" for layers in self.depths)


@section(
    "methods at",
    "reproduce/deepnet-table1.json",
    given=("dropout 0.1", "the two best have three seeds", "the papers' warm-ups rise by 1e-7 to 4e-7"),
)
def methods_by_depth(document: Data) -> Pieces:
    table = MethodsByDepth(document)
    loss = table.mean
    setting = re.search(r"dim .* warm-up", document["setting"])
    assert setting is not None
    yield f"{word(len(table.methods)).capitalize()} methods at {table.depths[0]} to {table.depths[-1]} layers per side"
    yield re.findall(r"Table \d+", document["source"])[0]
    yield setting[0]
    yield re.findall(r"differ by factors of \d", document["setting"])[0]
    warmup = int(re.findall(r"(\d+) of them for warm-up", setting[0])[0])
    yield f"of {word(len(table.best('deepnorm', 6)))} seeds, and the learning rate"
    yield from table.rows()

    lost = {method: loss("loss", method, 50) - loss("loss", method, 6) for method in ("pre_ln", "admin", "ds_init", "deepnorm")}
    yield f"from 6 to 50 layers per side Pre-LN loses {lost['pre_ln']:.1f} nats"
    yield f"Admin {lost['admin']:.1f}, DS-Init {lost['ds_init']:.1f}, and Post-LN dies"
    assert all(run["outcome"] == "finished" for layers in table.depths for run in table.best("deepnorm", layers))
    yield f"DeepNorm loses {lost['deepnorm']:.2f}, lives at every depth"
    yield f"{loss('bleu', 'deepnorm', 50) - loss('bleu', 'pre_ln', 50):.0f} BLEU ahead of Pre-LN at 50L-50L"

    lower = ("rezero", "dlcl", "r_fixup", "t_fixup")
    assert all(loss("loss", method, 50) < loss("loss", "deepnorm", 50) for method in lower)
    (taken,) = {table.best(method, 50)[0]["options"]["train.lr"] for method in lower[:-1]}
    own = table.best("deepnorm", 50)[0]["options"]["train.lr"]
    yield f"take a rate of {rate(taken)} at 50L-50L, where DeepNorm takes {rate(own)}"
    yield f"At one rate, 1e-3, and one seed, DeepNorm has {table.first('deepnorm', 1e-3)}"
    yield f"at {listed(map(str, table.depths))} layers per side, Pre-LN {table.first('pre_ln', 1e-3)}"
    yield f"ReZero {table.first('rezero', 1e-3)}, and R-Fixup {table.first('r_fixup', 1e-3)}"

    yield f"a warm-up that rises by {rate(1e-3 / warmup)} to {rate(2e-3 / warmup)} per step"
    tried = table.at("deepnorm", 18, 2e-3)
    assert [run["outcome"] for run in tried].count("dead") == 1
    yield f"At 18L-18L and 2e-3 one seed of {word(len(tried))} is dead at the end"
    steep, gentle = ([run["loss"] for run in table.at("deepnorm", 100, lr)] for lr in (1e-3, 5e-4))
    assert fmean(gentle) < fmean(steep)
    assert all(run["outcome"] == "finished" for run in table.at("deepnorm", 100, 1e-3))
    yield f"At 100L-100L and 1e-3 all {word(len(steep))} seeds live, but end at {listed(f'{each:.2f}' for each in steep)}"
    yield f"5e-4 has the lower mean ({listed(f'{each:.2f}' for each in gentle)})"
    assert all(run["outcome"] == "dead" for layers in (50, 100) for run in table.at("deepnorm", layers, 2e-3))
    yield "At 50L-50L and at 100L-100L it is dead at 2e-3"

    lower = ("rezero", "r_fixup", "t_fixup")
    ends = [f"{SHOWN[method]} ({loss('loss', method, 100):.2f})" for method in lower]
    assert all(loss("loss", method, 100) < loss("loss", "deepnorm", 100) for method in lower)
    yield f"At 100L-100L {listed(ends)} end lower than DeepNorm ({loss('loss', 'deepnorm', 100):.2f})"
    ahead = loss("bleu", "deepnorm", 100) - loss("bleu", "pre_ln", 100)
    yield f"{ahead:.0f} BLEU ahead of Pre-LN ({loss('loss', 'pre_ln', 100):.2f})"
    steep = [run["outcome"] for run in table.at("r_fixup", 100, 2e-3)]
    assert (len(steep), steep.count("diverged"), steep.count("finished")) == (3, 1, 2)
    assert table.best("r_fixup", 100)[0]["options"]["train.lr"] == 1e-3
    yield "R-Fixup takes 1e-3, since one seed of three diverges at 2e-3"
    assert not any(table.best(method, 100) for method in ("post_ln", "ds_init", "admin", "dlcl", "normformer"))
    first = {
        method: {
            run["options"]["train.lr"]: run for run in table.of(table.runs, method, 100) if run["options"]["train.seed"] == 1
        }
        for method in ("post_ln", "ds_init", "admin", "normformer", "rezero")
    }
    rates = sorted(first["post_ln"])
    assert sorted(first["ds_init"]) == rates
    assert {run["outcome"] for run in first["post_ln"].values()} == {"dead"}
    yield f"Post-LN is dead at every rate from {rate(rates[0])} to {rate(rates[-1])}"
    assert [lr for lr in rates if first["ds_init"][lr]["outcome"] != "dead"] == rates[:1]
    gentle = first["ds_init"][rates[0]]
    yield f"DS-Init at all but the smallest, where it hardly learns ({gentle['loss']:.2f}, BLEU {gentle['bleu']:.1f})"
    admin = {lr: run for lr, run in sorted(first["admin"].items()) if run["outcome"] == "finished"}
    assert all(lr > max(admin) for lr in first["admin"] if lr not in admin)
    losses = listed(f"{run['loss']:.2f}" for run in admin.values())
    yield f"Admin lives at {listed(map(rate, admin))} ({losses}) and at no larger one"
    assert first["rezero"][8e-3]["outcome"] == "diverged"
    yield f"ReZero diverges at {rate(8e-3)}"
    two = [run["loss"] for run in table.at("dlcl", 100, 4e-3)]
    yield f"DLCL has {listed(f'{each:.2f}' for each in two)} with {word(len(two))} seeds at {rate(4e-3)}"
    yield f"NormFormer {min(run['loss'] for run in first['normformer'].values()):.2f} with one"


@section(
    "With a slower warm-up",
    "depth/slow-warmup.json",
    "reproduce/deepnet-table1.json",
    given=("the mean of two seeds where a cell says so",),
)
def slow_warmup(document: Data, short: Data) -> Pieces:
    every = [*document["runs"], *document["not_chosen"]]
    assert all(run["outcome"] == "finished" for run in every)
    rates = sorted({run["options"]["train.lr"] for run in every})
    (layers,) = {run["options"]["layers"] for run in every}
    (steps,) = {run["valid"][-1][0] for run in every}
    (warmup,) = re.findall(r'"warmup_steps": (\d+)', (ROOT / "benchmarks/depth/slow_warmup.py").read_text())
    methods = ("r_fixup", "dlcl", "deepnorm", "rezero", "pre_ln")
    cells = {
        (method, lr): [run for run in every if (run["options"]["model.recipe"], run["options"]["train.lr"]) == (method, lr)]
        for method in methods
        for lr in rates
    }
    trained = {method: [cells[method, lr] for lr in rates if cells[method, lr]] for method in methods}
    best = {method: min(fmean(run["loss"] for run in runs) for runs in trained[method]) for method in methods}
    yield f"{both_sides(layers)} of DeepNorm are ahead"
    yield f"at {both_sides(layers)}, but {steps:,} steps, {int(warmup):,} of them for warm-up"
    assert best["deepnorm"] == fmean(run["loss"] for run in cells["deepnorm", 2e-3])
    assert all(run["outcome"] == "dead" for run in MethodsByDepth(short).at("deepnorm", layers, 2e-3))
    yield "DeepNorm takes 2e-3 here, where it is dead"
    below = {method: best[method] - best["deepnorm"] for method in methods}
    yield f"it is {below['rezero']:.2f} nats below ReZero, {below['pre_ln']:.2f} below Pre-LN"
    assert abs(below["dlcl"]) < 0.015
    yield f"R-Fixup is another {-below['r_fixup']:.2f}"
    yield "DLCL at 8e-3, the other five methods and"
    yield "100L-100L are still to be trained"
    yield row("", *map(rate, rates))
    for method in methods:
        yield row(SHOWN[method], *(_loss_and_bleu(cells[method, lr]) for lr in rates))


def _loss_and_bleu(runs: list[Data]) -> str:
    """Means over the seeds; - for a rate that a method has not been trained at."""
    if not runs:
        return "-"
    seeds = f" ({word(len(runs))} seeds)" if len(runs) > 1 else ""
    return f"{fmean(run['loss'] for run in runs):.2f}, {fmean(run['bleu'] for run in runs):.1f}{seeds}"


@section("gains from a higher learning rate", "reproduce/deepnet-figure7.json", given=("DeepNorm 18L-18L",))
def figure7(document: Data) -> Pieces:
    found = document["found"]
    runs = [run for own in found.values() for run in own]
    setting = re.search(
        r"dim (\d+), ([\d,]+) tokens and (\S+) with one changed.*; ([\d,]+ steps, \d+ of them)", document["setting"]
    )
    assert setting is not None
    assert document["verdict"] == "held"
    assert all(run["outcome"] == "finished" for run in runs)
    yield re.findall(r"Figure \d+", document["source"])[0]
    yield f"{setting[4]} for warm-up, mean of {word(len({run['options']['train.seed'] for run in runs}))} seeds"
    yield f"from a learning rate of {setting[3]}, {setting[2]} tokens and dim {setting[1]}"
    yield f"All {word(len(runs))} runs live"
    columns = []
    for option, shown in (("train.lr", rate), ("batches.tokens", "{:,}".format), ("model.dim", str)):
        own: dict[Any, list[Data]] = {}
        for run in found[option]:
            own.setdefault(run["options"][option], []).append(run)
        cells = [(shown(value), f"{mean(runs, 'loss'):.2f}, {mean(runs, 'bleu'):.1f}") for value, runs in own.items()]
        columns.append([("", "")] * (4 - len(cells)) + cells)
    for cells in zip(*columns, strict=True):
        yield row(*(text for pair in cells for text in pair))


def mean(runs: Iterable[Data], name: str) -> float:
    return fmean(run[name] for run in runs)


@cache
def dead_table() -> Data:
    """The functions of benchmarks/dead/table.py, and its runs."""
    names = runpy.run_path(str(ROOT / "benchmarks/dead/table.py"))
    return {**names, "runs": names["every_run"]()}


@section(
    "A run that recovers is not ended",
    "dead/runs.json",
    "dead/deepnorm.json",
    "reproduce/deepnet-table1.json",
    "reproduce/admin-figure2.json",
    "reproduce/admin-table4.json",
    "reproduce/admin-checks.json",
    "dead/images.json",
    given=("rates by factors of 2", "CIFAR-10"),
)
def dying_stacks(*_: Data) -> Pieces:
    table = dead_table()
    runs = table["runs"]
    fit, test = ([run for run in runs if run["set"] == name] for name in ("fit", "test"))
    wrong, found, early = table["errors"](test)
    living, died = table["living"](test), table["died"](test)
    late = [run for run in died if not table["low_at"](run, DEAD, 0.5)]
    (short, low), (long, high) = DYING
    layers, warmups = ({run[name] for run in runs} for name in ("layers", "warmup"))
    yield f"below {rate(DEAD)} over the last tenth"
    yield f"below {as_fraction(low)} for {short:.0%} of the steps, or below {as_fraction(high)} for {long:.0%}"
    yield f"chosen on {len(fit)} runs that went to their end, and tested on {len(test)} others"
    yield f"{min(layers)} to {max(layers)} layers, {word(len({run['task'] for run in runs}))} tasks"
    yield f"{100 * min(warmups):.0f} to {max(warmups):.0%} of the steps"
    yield row("living", str(len(living)), f"{wrong} (at most {table['bound'](len(living)):.1%}, with 95% confidence)")
    yield row("dead at the end", str(len(died)), f"{found}, {early} of them in the first half of the run")
    yield f"{word(len(late)).capitalize()} of the dead were never below {rate(DEAD)}"
    assert not [
        rule
        for rule in table["RULES"]
        if not table["errors"](test, rule)[0] and table["errors"](test, rule)[2] >= 0.9 * len(died)
    ]
    wrong, _, early = table["errors"](test, ((0.05, 3e-4),))
    yield f"less than 3e-4 over 5% of the steps would find {early} in the first half, and end {word(wrong)} that live"
    for level, *counts in table["levels"](runs):
        yield row(as_fraction(level), *map(str, counts))
    yield from _image_classifiers(table)


def _image_classifiers(table: Data) -> Pieces:
    runs = table["image_runs"]()
    wrong, found, early = table["errors"](runs)
    living, died, layers = table["living"](runs), table["died"](runs), {run["layers"] for run in runs}
    yield f"{len(runs)} runs of small image classifiers"
    steps = {run["steps"] for run in runs}
    yield f"{len({run['recipe'] for run in runs})} recipes, {min(layers)} to {max(layers)} layers"
    yield f"{min(steps)} to {max(steps)}"
    yield row("living", str(len(living)), f"{wrong} (at most {table['bound'](len(living)):.1%}, with 95% confidence)")
    yield row("dead at the end", str(len(died)), f"{found}, {early} of them in the first half of the run")
