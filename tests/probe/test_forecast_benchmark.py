"""The benchmark of the forecast: which runs survive, and how a forecast is calibrated and scored."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "forecast"


@pytest.fixture(scope="module")
def score() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("score")


def test_the_rule_of_survival_on_made_curves(score: ModuleType) -> None:
    def fates(*runs: tuple[float, float, float]) -> list[str]:
        return score.fates([score.Ended(lr, 0.1, loss, alive) for lr, loss, alive in runs], frequency_loss=5.0)

    assert fates((1e-3, 2.0, 1.0), (2e-3, 2.19, 1.0), (4e-3, 2.21, 1.0)) == ["survived", "survived", "behind"]
    assert fates((1e-3, 2.0, 1.0), (2e-3, math.inf, 1.0), (4e-3, math.nan, 1.0)) == ["survived", "not finite", "not finite"]
    assert fates((1e-3, 2.0, 1.0), (2e-3, 1.0, 1e-5), (4e-3, 5.1, 1.0)) == ["survived", "stack dead", "no progress"]
    assert fates((1e-3, 4.0, 1.0), (2e-3, 2.0, 1.0)) == ["slow", "survived"]
    assert fates((1e-3, 5.1, 1.0), (2e-3, 2.0, 1.0)) == ["slow", "survived"]
    assert fates((1e-3, 6.0, 1.0), (2e-3, 6.0, 1.0)) == ["no progress", "no progress"]


def test_a_shorter_warm_up_at_the_best_rate_that_ends_behind_has_not_survived(score: ModuleType) -> None:
    short, best, long = (score.Ended(1e-3, warmup, loss, 1.0) for warmup, loss in ((0.01, 3.0), (0.1, 2.0), (0.4, 3.0)))
    assert score.fates([short, best, long], frequency_loss=5.0) == ["behind", "survived", "slow"]


def cases(score: ModuleType, layers: int, power: float) -> list[Any]:
    """Runs that live up to twice their edge at a warm-up of 100 steps, by a power of the warm-up."""
    return [
        score.Case(
            score.Row("text", "recipe", layers),
            lr,
            warmup,
            "survived" if lr <= 2 * edge * (warmup / 100) ** power else "no progress",
            {"edge": edge, "other": 1.0},
        )
        for edge in (1e-3, 4e-3, 1.6e-2)
        for lr in (5e-4 * 1.5**step for step in range(12))
        for warmup in (25, 100, 400)
    ]


def test_the_fit_finds_the_law_that_made_the_runs(score: ModuleType) -> None:
    rule = score.fit(("edge",), cases(score, 6, 0.5))
    assert rule.power == 0.5
    assert rule.factors["edge"] == pytest.approx(2, rel=0.25)
    held = cases(score, 100, 0.5)
    assert score.score(rule, held) == score.Score(len(held), 0, 0)


def test_wrong_forecasts_are_told_apart_by_their_side(score: ModuleType) -> None:
    held = cases(score, 100, 0.0)
    lives = sum(case.lives for case in held)
    assert score.score(score.Rule({"other": 1e9}, 0.0), held) == score.Score(lives, len(held) - lives, 0)
    assert score.score(score.Rule({"other": 1e-9}, 0.0), held) == score.Score(len(held) - lives, 0, lives)


def test_the_grid_has_sixty_runs_that_are_held_out(score: ModuleType) -> None:
    grid = importlib.import_module("grid")
    jobs = [job for row in grid.rows() for job in grid.jobs_of(row)]
    assert len({job.name for job in jobs}) == len(jobs)
    held = [job for job in jobs if job.row.part == "held-out"]
    assert len(held) >= 60
    assert {job.row.text for job in held} == {"shakespeare", "multi30k"}
    assert all(job.row.layers > 18 for job in held)
