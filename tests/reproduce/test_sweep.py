"""Rates are chosen with one seed, and further seeds are trained at the chosen rate alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kilolayer.reproduce.cells import grid_of
from kilolayer.reproduce.lab import Lab, Run
from kilolayer.reproduce.sweep import at_best_rate

AXES = {"model.recipe": ("post_ln", "deepnorm"), "layers": (6, 18)}
RATES = (5e-4, 2e-3)


@dataclass(frozen=True)
class MadeUp(Lab):
    """Runs whose loss is known without training. ends: what became of a run, by recipe, layers and rate; all else finished."""

    folder: Path = Path("made-up")
    ends: Mapping[tuple[str, int, float], str] = field(default_factory=dict)
    asked: list[Mapping[str, Any]] = field(default_factory=list)

    def compare_settings(self, name: str, config: Any, settings: Sequence[Mapping[str, Any]]) -> list[Run]:
        self.asked.extend(settings)
        return [self.run_of(dict(each)) for each in settings]

    def run_of(self, options: dict[str, Any]) -> Run:
        key = options["model.recipe"], options["layers"], options["train.lr"]
        # DeepNorm is best at the larger rate, Post-LN at the smaller; the second seed is worse than the other rate's first.
        best = {"deepnorm": 2e-3, "post_ln": 5e-4}[key[0]]
        loss = 2.0 + 0.1 * (key[2] != best) + 0.5 * (options["train.seed"] == 2)
        return {
            "options": options,
            "outcome": self.ends.get(key, "finished"),
            "text": "",
            "loss": loss,
            "cost": loss,
            "bleu": None,
        }


def wanted(found: list[Run]) -> set[tuple[Any, ...]]:
    return {tuple(run["options"].values()) for run in found}


def test_further_seeds_are_trained_at_the_best_rate_of_the_first() -> None:
    lab = MadeUp()
    found = at_best_rate(lab, "any", {}, AXES, RATES, (1, 2, 3))
    best = {"post_ln": 5e-4, "deepnorm": 2e-3}
    cells = [(recipe, layers) for recipe in AXES["model.recipe"] for layers in AXES["layers"]]
    assert wanted(found["runs"]) == {(*cell, best[str(cell[0])], seed) for cell in cells for seed in (1, 2, 3)}
    assert wanted(found["not_chosen"]) == {(*cell, sum(RATES) - best[str(cell[0])], 1) for cell in cells}
    assert len(lab.asked) == len(cells) * (len(RATES) + 2)


def test_a_dead_rate_is_not_chosen_and_a_dead_cell_has_every_seed() -> None:
    ends = {("deepnorm", 18, 2e-3): "dead", ("post_ln", 18, 5e-4): "diverged", ("post_ln", 18, 2e-3): "dead"}
    found = at_best_rate(MadeUp(ends=ends), "any", {}, AXES, RATES, (1, 2))
    rates = {tuple(run["options"].values())[:3] for run in found["runs"]}
    assert ("deepnorm", 18, 5e-4) in rates
    assert ("deepnorm", 18, 2e-3) not in rates
    dead = [run for run in found["runs"] if run["options"]["model.recipe"] == "post_ln" and run["options"]["layers"] == 18]
    assert sorted(run["options"]["train.seed"] for run in dead) == [1, 2]


def test_nothing_is_chosen_before_every_rate_has_ended() -> None:
    lab = MadeUp(ends={("deepnorm", 18, 5e-4): "waiting"})
    found = at_best_rate(lab, "any", {}, AXES, RATES, (1, 2))
    own = [run for run in found["runs"] if run["options"]["model.recipe"] == "deepnorm" and run["options"]["layers"] == 18]
    assert sorted((run["options"]["train.lr"], run["options"]["train.seed"]) for run in own) == [(5e-4, 1), (2e-3, 1)]
    assert all(run not in found["not_chosen"] for run in own)


def test_a_cell_before_its_rate_is_chosen_has_not_ended() -> None:
    found = at_best_rate(MadeUp(ends={("deepnorm", 18, 5e-4): "waiting"}), "any", {}, AXES, RATES, (1, 2))
    grid = grid_of(found["runs"], "model.recipe", "layers")
    assert [(recipe, layers) for recipe, cells in grid.items() for layers, cell in cells.items() if not cell.ended] == [
        ("deepnorm", 18)
    ]
    assert grid["deepnorm"][6].lives
