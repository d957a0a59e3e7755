"""The cells of reproductions: the best setting of each is the one that the comparison's own table chooses."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from kilolayer.compare.comparison import Comparison
from kilolayer.compare.outcome import Kind, Outcome
from kilolayer.compare.result import Member, Result
from kilolayer.compare.table import tabulate
from kilolayer.reproduce.cells import cell_of, cells_by, grid_of, is_lower
from kilolayer.reproduce.lab import as_json
from kilolayer.reproduce.stored_run import Run

KINDS: tuple[Kind, ...] = ("finished",) * 3 + ("diverged", "dead", "no_progress", "unfinished", "failed", "waiting")
SETTINGS = [
    {"model.recipe": recipe, "layers": layers, "train.lr": lr, "train.warmup_steps": warmup, "train.seed": seed}
    for recipe in ("post_ln", "deepnorm")
    for layers in (6, 18)
    for lr in (1e-3, 2e-3)
    for warmup in (10, 20)
    for seed in (1, 2)
]


def run_of(loss: float | None, seed: int = 1, outcome: str = "finished", **options: Any) -> Run:
    """A run as a comparison tells it; options with "__" for "."."""
    named = {name.replace("__", "."): value for name, value in options.items()} | {"train.seed": seed}
    text = "finished" if outcome == "finished" else f"{outcome} at step 7"
    return {"options": named, "outcome": outcome, "text": text, "loss": loss, "cost": loss, "bleu": None}


def made_up(task: str, generator: random.Random) -> tuple[Comparison, list[Result]]:
    """Runs of all ends, whose loss falls and rises again and whose other measures go their own way."""
    results = []
    for index, options in enumerate(SETTINGS):
        kind = generator.choice(KINDS)
        steps = 0 if kind == "waiting" else generator.randint(1, 4)
        rows: list[dict[str, Any]] = [
            {"step": step, "loss": generator.uniform(2, 3), "accuracy": generator.uniform(0, 9), "bleu": None}
            for step in range(1, steps + 1)
        ]
        results.append(Result(f"run{index}", options, Path(f"run{index}"), Outcome(kind, 7, f"{kind} at 7"), [], rows, {}))
    members = [Member(result.name, result.options, result.folder) for result in results]
    return Comparison(Path("made-up"), members, {"task": task}), results


@pytest.mark.matrix(4)
@pytest.mark.parametrize("task", ["translation", "masked_lm"])
@pytest.mark.parametrize("seed", range(20))
def test_a_reproduction_and_the_comparisons_table_choose_the_same(task: str, seed: int) -> None:
    comparison, results = made_up(task, random.Random(seed))
    table = tabulate(comparison, results)
    assert table.chosen_by.key == ("accuracy" if task == "masked_lm" else "loss")
    grid = grid_of([as_json(result, table.chosen_by) for result in results], "model.recipe", "layers")
    for recipe, cells in grid.items():
        for layers, cell in cells.items():
            beside = table.cell(recipe, layers)
            assert beside is not None
            chosen = {name: cell.options[name] for name in ("train.lr", "train.warmup_steps")}
            assert chosen == beside.best.options
            spread = beside.best.spread(table.measures[-1])
            assert table.measures[-1].title == "validation loss"
            if math.isfinite(cell.loss):
                assert spread is not None
                assert cell.loss == pytest.approx(spread.mean)


def test_the_best_validation_counts_though_a_later_one_is_worse() -> None:
    def result(name: str, lr: float, losses: list[float]) -> Result:
        rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
        return Result(name, {"train.lr": lr}, Path(name), Outcome("finished", 2, "finished"), [], rows)

    results = [result("early", 1e-3, [2.0, 2.6]), result("late", 2e-3, [3.0, 2.5])]
    comparison = Comparison(Path("made-up"), [Member(each.name, each.options, each.folder) for each in results], {})
    cell = cell_of(as_json(each, tabulate(comparison, results).chosen_by) for each in results)
    assert cell is not None
    assert (cell.options, cell.loss) == ({"train.lr": 1e-3}, 2.0)


@pytest.mark.parametrize(
    ("outcomes", "best"),
    [
        ({1e-3: ("finished", "finished"), 2e-3: ("finished", "waiting")}, 1e-3),  # the better mean is not known yet
        ({1e-3: ("finished", "diverged"), 2e-3: ("waiting", "waiting")}, 2e-3),  # which may still live
        ({1e-3: ("finished", "diverged"), 2e-3: ("diverged", "waiting")}, 1e-3),  # neither can live
        ({1e-3: ("diverged", "diverged"), 2e-3: ("diverged", "finished")}, 2e-3),
        ({1e-3: ("dead", "dead"), 2e-3: ("failed", "failed")}, 2e-3),
    ],
)
def test_fewer_deaths_go_first_then_more_results(outcomes: dict[float, tuple[str, str]], best: float) -> None:
    runs = [
        run_of(2.0 - lr if outcome == "finished" else None, seed, outcome, train__lr=lr)
        for lr, ends in outcomes.items()
        for seed, outcome in enumerate(ends)
    ]
    cell = cell_of(runs)
    assert cell is not None
    assert cell.options == {"train.lr": best}


def test_a_cell_is_the_best_setting_over_its_seeds() -> None:
    runs = [run_of(2.0, 1, train__lr=1e-3), run_of(2.2, 2, train__lr=1e-3), run_of(1.9, 1, train__lr=2e-3)]
    runs += [run_of(None, 2, "diverged", train__lr=2e-3)]
    cell = cell_of(runs)
    assert cell is not None
    assert cell.options == {"train.lr": 1e-3}
    assert cell.loss == pytest.approx(2.1)
    assert cell.error == pytest.approx(0.1)  # |2.2 - 2.0| / sqrt(2), over sqrt(2)
    dead = cell_of([run_of(None, 1, "diverged"), run_of(None, 2, "diverged")])
    assert dead is not None
    assert (dead.lives, dead.ended, dead.shown) == (False, True, "diverged at step 7")
    waiting = cell_of([run_of(None, 1, "waiting")])
    assert waiting is not None
    assert not waiting.ended


@pytest.mark.parametrize("outcome", ["waiting", "unfinished", "failed"])
@pytest.mark.parametrize("known", ["finished", "diverged"])
def test_a_cell_with_a_candidate_without_a_result_decides_nothing(outcome: str, known: str) -> None:
    runs = [run_of(2.0 + 0.01 * seed if known == "finished" else None, seed, known, train__lr=1e-3) for seed in (1, 2)]
    other = cell_of([run_of(3.0 + 0.01 * seed, seed) for seed in (1, 2)])
    whole = cell_of(runs)
    part = cell_of([*runs, run_of(None, 1, outcome, train__lr=2e-3)])
    assert part is not None
    assert whole is not None
    assert other is not None
    assert (whole.ended, whole.lives, whole.died) == (True, known == "finished", known == "diverged")
    assert (part.ended, part.lives, part.died) == (False, False, False)
    assert is_lower(part, other) is None
    assert is_lower(other, part) is None
    if known == "finished":
        assert is_lower(whole, other) is True
        assert part.shown == "2.015 ± 0.005 (1 of 3 runs without a result)"


def test_lower_needs_two_standard_errors_and_a_margin() -> None:
    def cell(*losses: float) -> Any:
        return cell_of([run_of(loss, seed) for seed, loss in enumerate(losses)])

    assert is_lower(cell(1.0, 1.01), cell(1.2, 1.21)) is True
    assert is_lower(cell(1.0, 1.4), cell(1.3, 1.5)) is False  # within the seeds' spread
    assert is_lower(cell(1.0, 1.0), cell(1.01, 1.01)) is False  # within the margin
    assert is_lower(cell(1.0), cell(1.2, 1.21)) is None  # one seed says nothing of spread


def test_grids_keep_the_order_of_the_runs() -> None:
    runs = [run_of(1.0, model__recipe=recipe, layers=layers) for recipe in ("post_ln", "deepnorm") for layers in (6, 100, 18)]
    assert list(grid_of(runs, "model.recipe", "layers")) == ["post_ln", "deepnorm"]
    assert list(cells_by(runs, "layers")) == [6, 100, 18]
