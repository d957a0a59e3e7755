"""What the page of a comparison answers: which, how deep, what went wrong, what now."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kilolayer.compare.advice import advice_on, next_steps
from kilolayer.compare.answers import answers
from kilolayer.compare.comparison import Comparison
from kilolayer.compare.outcome import Kind, Outcome
from kilolayer.compare.result import Member, Result
from kilolayer.compare.table import ComparisonTable, tabulate
from kilolayer.compare.verdicts import Verdict
from kilolayer.compare.view import view_of


def result(recipe: str, layers: int, kind: Kind = "finished", loss: float = 3.0, bleu: float = 20.0, **more: Any) -> Result:
    """A run with one validation; more: options of training, in which runs differ."""
    train = {"lr": 1e-3, "warmup_steps": 400, "steps": 2000, "seed": 1, **more}
    options = {"model.recipe": recipe, "layers": layers, **{f"train.{name}": value for name, value in more.items()}}
    rows = [{"kind": "valid", "step": 100, "loss": loss}]
    config = {"task": "translation", "model": {"recipe": {"name": recipe}, "layers": layers}, "train": train}
    scores = {"test": {"bleu": {"name": "BLEU", "value": bleu}}}
    name = "-".join(map(str, [recipe, layers, *more.values()]))
    return Result(name, options, Path("runs") / name, Outcome(kind, 100, kind), [], rows, [], scores, config)


def compared(results: list[Result], folder: Path = Path("runs/a b")) -> tuple[Comparison, ComparisonTable]:
    members = [Member(each.name, each.options, each.folder) for each in results]
    comparison = Comparison(folder, members, base={"train": {}})
    return comparison, tabulate(comparison, results)


def test_which_and_how_deep() -> None:
    results = [result("post_ln", 6, loss=2.5), result("post_ln", 18, loss=2.7), result("post_ln", 50, "diverged")]
    results += [result("deepnorm", 6, loss=2.6), result("deepnorm", 18, loss=2.4), result("deepnorm", 50, loss=2.2, bleu=30.0)]
    _, table = compared(results)
    assert answers(table, []) == [
        "Best: deepnorm 50L, BLEU, test 30.0, chosen by validation loss.",
        "post_ln: best at 6L; no run finished at 50L.",
        "deepnorm: best at 50L.",
    ]


def test_of_many_cells_the_number_is_told() -> None:
    results = [
        result(recipe, layers, lr=rate, loss=2 + rate) for recipe in ("a", "b") for layers in range(1, 8) for rate in (1, 2)
    ]
    _, table = compared(results)
    titles = [table.title_of(cell) for cell in table.cells[1:]]

    def judged(mark: str, count: int) -> list[Verdict]:
        found: Any = SimpleNamespace(verdict=mark)
        return [Verdict(title, title, "a 1L", found) for title in titles[:count]]

    assert answers(table, judged("=", 8))[1] == f"Not significantly different from it: {', '.join(titles[:8])}."
    assert answers(table, judged("=", 9))[1] == "Not significantly different from it: all 9 others."
    assert answers(table, [*judged("-", 9), *judged("=", 1)])[1:3] == [
        f"Not significantly different from it: {titles[0]}.",
        "Significantly worse: 9 of the 10 others.",
    ]
    named = ", ".join([table.title_of(table.cells[0]), *titles])
    assert table.notes == (f"{named}: their best train.lr, 1, is the smallest that was tried",)


def test_nothing_is_called_best_before_there_is_a_result() -> None:
    assert answers(compared([result("post_ln", 6, "waiting"), result("pre_ln", 6, "waiting")])[1], []) == [
        "No run has finished yet."
    ]
    assert answers(compared([result("post_ln", 6, "dead")])[1], []) == ["No run has finished."]
    under_way = compared([result("post_ln", 6), result("post_ln", 18, "unfinished")])[1]
    assert answers(under_way, [])[0].startswith("Best so far: 6L post_ln")
    assert answers(under_way, [])[1:] == ["post_ln: finished at 6L."]


def test_a_score_of_zero_gives_way_to_the_loss() -> None:
    """By hand: with a BLEU of 0 everywhere the order is that of the losses, and the table is by loss."""
    results = [result("post_ln", 6, loss=2.5, bleu=0.04), result("deepnorm", 6, loss=2.4, bleu=0.0)]
    _, table = compared(results)
    assert [measure.title for measure in table.measures] == ["validation loss", "BLEU, test"]
    assert answers(table, [])[0] == "Best: deepnorm 6L, validation loss 2.400."
    mixed = compared([result("post_ln", 6, loss=2.5, bleu=0.0), result("deepnorm", 6, loss=2.4, bleu=9.0)])[1]
    assert mixed.lines(mixed.measures[0]) == [["post_ln", "0.0, validation loss 2.500"], ["deepnorm", "9.0"]]


def test_what_helped_a_neighbour_is_the_advice_and_else_a_slower_start() -> None:
    lost = result("post_ln", 18, "diverged", lr=4e-3)
    helped = [lost, result("post_ln", 18, lr=1e-3), result("pre_ln", 18, lr=4e-3)]
    assert advice_on(lost, helped) == "Finished with train.lr 0.001."
    assert advice_on(lost, [lost, result("pre_ln", 18, lr=4e-3)]) == (
        "Try train.lr 0.001 or train.warmup_steps 1,600, or model.recipe deepnorm."
    )
    dead = result("deepnorm", 18, "dead", warmup_steps=40)
    assert advice_on(dead, [dead]) == "Try train.lr 0.00025 or train.warmup_steps 400."
    short = result("deepnorm", 18, "no_progress", warmup_steps=4000)
    assert "ended within its warm-up of 4,000 steps" in advice_on(short, [short])
    slow = result("deepnorm", 18, "no_progress")
    assert advice_on(slow, [slow]).startswith("Train for more than 2,000 steps, or try train.lr 0.00025")
    failed = result("deepnorm", 18, "failed")
    assert "log" in advice_on(failed, [failed])
    unknown = Result("a", {}, Path("a"), Outcome("diverged", 1, ""))  # its config.toml is lost
    assert advice_on(unknown, [unknown]) == "Look at its report and its log."


def test_an_equal_run_with_another_seed_is_named_only_without_a_better_neighbour() -> None:
    lost = result("post_ln", 18, "dead", lr=4e-3, seed=1)
    other_seed, other_rate = result("post_ln", 18, lr=4e-3, seed=2), result("post_ln", 18, lr=1e-3, seed=1)
    assert advice_on(lost, [lost, other_seed, other_rate]) == "Finished with train.lr 0.001."
    assert advice_on(lost, [lost, other_seed]) == "Finished with train.seed 2."


def test_the_next_steps_are_commands() -> None:
    results = [result("post_ln", 6, lr=1e-3, loss=2.0), result("post_ln", 6, lr=2e-3, loss=1.9)]
    results += [result("post_ln", 18, "diverged", lr=1e-3), result("post_ln", 18, "diverged", lr=2e-3)]
    results += [result("pre_ln", 6, "waiting", lr=1e-3)]
    comparison, table = compared(results)
    found = [shlex.split(step.command)[1:] for step in next_steps(comparison, results, table)]
    assert found == [
        ["compare", "runs/a b"],
        ["compare", "runs/a b", "--set", "train.lr=0.004"],  # 2e-3 is the best and the largest: as far again
        ["compare", "runs/a b", "--set", "train.lr=0.00025"],  # a fourth of the smallest that died
        ["diagnose", "runs/post_ln-18-0.001"],
    ]
    comparison.base = None  # runs that exist cannot be extended
    assert [step.command.split()[1] for step in next_steps(comparison, results, table)] == ["diagnose"]


def test_short_runs_without_progress_are_not_told_to_slow_down() -> None:
    """Two rates, 40 steps, nothing diverged, and the loss falls with the rate: more steps or a higher rate, no lower one."""
    slow = {"steps": 40, "warmup_steps": 4}
    results = [result("post_ln", 4, "no_progress", loss=4.45, lr=1e-3, **slow)]
    alone = [*results, result("post_ln", 6, "no_progress", loss=4.4, lr=1e-2, **slow)]
    results += [result("post_ln", 4, "no_progress", loss=3.49, lr=1e-2, **slow)]
    comparison, table = compared(results)
    commands = [step.command for step in next_steps(comparison, results, table)]
    assert [command.partition(" --set ")[2] for command in commands[:2]] == ["train.lr=0.04", "train.steps=160"]
    assert not any("train.lr=0.0002" in command for command in commands)
    assert {advice_on(each, results) for each in results} == {
        "Train for more than 40 steps, or try train.lr 0.04: the loss falls as the rate rises."
    }
    stays = replace(results[1], train=[{"step": step, "loss": 3.5} for step in range(6)])
    assert advice_on(stays, [results[0], stays]).startswith("The run is short")  # a plateau needs time
    for each in alone:  # a single rate says nothing about others
        assert advice_on(each, alone) == "The run is short: train for more than 40 steps before you judge its options."
    falling = [result("post_ln", 4, "no_progress", loss=loss, lr=lr) for loss, lr in ((3.4, 1e-3), (3.5, 1e-2))]
    comparison, table = compared(falling)  # of 2,000 steps
    assert next_steps(comparison, falling, table)[0].command.endswith("--set train.lr=0.00025")


def test_one_seed_is_no_spread() -> None:
    results = [result("post_ln", 6), result("post_ln", 18)]
    comparison, table = compared(results)
    (step,) = next_steps(comparison, results, table)
    assert step.command.endswith(" --seeds 1,2,3")


def test_the_page_links_to_reports_and_names_what_all_share(tmp_path: Path) -> None:
    folder = tmp_path / "compared"
    results = [result("post_ln", 6), result("deepnorm", 6, "diverged")]
    inside, outside = folder / "runs" / "a?#<b", tmp_path / "javascript:alert(1)"
    for path in (inside, outside):
        path.mkdir(parents=True)
        (path / "report.html").write_text("")
    results = [Result(**{**vars(each), "folder": path}) for each, path in zip(results, (inside, outside), strict=True)]
    comparison, table = compared(results, folder)
    view = view_of(comparison, results, table, [])
    assert [run.report for run in view.runs] == [
        "runs/a%3F%23%3Cb/report.html",
        "../javascript%3Aalert%281%29/report.html",
    ]
    assert view.summary == "2 runs of translation, all with layers 6L, steps 2000, lr 0.001, warmup steps 400, seed 1"
    assert "train.steps = 2000" in view.shared
    assert not any(line.startswith("model.recipe") for line in view.shared)
    assert [bool(run.advice) for run in view.runs] == [False, True]
