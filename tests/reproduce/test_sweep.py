"""Rates are chosen among the two best of the first seed, by the mean over all seeds, and none at the edge of its grid."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kilolayer.reproduce.cells import grid_of
from kilolayer.reproduce.lab import Lab, combinations, digest_of, earlier_runs
from kilolayer.reproduce.stored_run import Run, has, keep
from kilolayer.reproduce.sweep import at_best_rate

SETTINGS = combinations({"model.recipe": ("post_ln", "deepnorm"), "layers": (6, 18)})
RATES = (5e-4, 1e-3, 2e-3)
BEST = {"deepnorm": 1e-3, "post_ln": 5e-4 / 2}
"""At which rate a made-up run has its lowest loss, with the first seed."""


@dataclass(frozen=True)
class MadeUp(Lab):
    """Runs whose loss is known without training: it grows with the distance from the best rate. ends: what became of a run, by
    recipe, layers and rate; all else finished. unlucky: what the further seeds lose at a rate."""

    folder: Path = Path("made-up")
    ends: Mapping[tuple[str, int, float], str] = field(default_factory=dict)
    unlucky: Mapping[float, float] = field(default_factory=dict)
    best: Mapping[str, float] = field(default_factory=lambda: BEST)
    asked: list[Mapping[str, Any]] = field(default_factory=list)

    def compare_settings(self, name: str, config: Any, settings: Sequence[Mapping[str, Any]]) -> list[Run]:
        self.asked.extend(settings)
        return [self.run_of(dict(each)) for each in settings]

    def run_of(self, options: dict[str, Any]) -> Run:
        key = options["model.recipe"], options["layers"], options["train.lr"]
        loss = 2.0 + abs(math.log2(key[2] / self.best[key[0]])) / 10
        loss += self.unlucky.get(key[2], 0.0) * (options["train.seed"] != 1)
        shared = {"outcome": self.ends.get(key, "finished"), "text": "", "bleu": None}
        return {"options": options, "loss": loss, "cost": loss, **shared}


def rates_of(found: list[Run], recipe: str, layers: int = 6) -> list[tuple[float, int]]:
    own = [run["options"] for run in found if run["options"]["model.recipe"] == recipe and run["options"]["layers"] == layers]
    return sorted((each["train.lr"], each["train.seed"]) for each in own)


def test_the_grid_grows_where_the_best_rate_is_at_its_edge() -> None:
    found = at_best_rate(MadeUp(), "any", {}, SETTINGS, RATES, (1, 2, 3))
    assert rates_of(found["runs"], "post_ln") == [(2.5e-4, 1), (2.5e-4, 2), (2.5e-4, 3)]
    tried = rates_of(found["runs"] + found["not_chosen"], "post_ln")
    assert sorted({rate for rate, _ in tried}) == [1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3]  # until one beyond is worse
    assert sorted({rate for rate, _ in rates_of(found["runs"] + found["not_chosen"], "deepnorm")}) == list(RATES)


def test_the_grid_does_not_grow_for_ever() -> None:
    found = at_best_rate(MadeUp(best={"deepnorm": 1e3, "post_ln": 1e-9}), "any", {}, SETTINGS, RATES, (1,))
    every = found["runs"] + found["not_chosen"]
    assert max(rate for rate, _ in rates_of(every, "deepnorm")) == 4 * RATES[-1]
    assert min(rate for rate, _ in rates_of(every, "post_ln")) == RATES[0] / 4
    tiny = MadeUp(best={"deepnorm": 1e3, "post_ln": 1e-9}, tiny=True)
    at_best_rate(tiny, "any", {}, SETTINGS, RATES, (1, 2))
    assert len(tiny.asked) == 4  # one rate and one seed


def test_the_mean_of_all_seeds_decides_between_the_two_best_rates() -> None:
    lab = MadeUp(unlucky={1e-3: 0.5})
    found = at_best_rate(lab, "any", {}, SETTINGS, RATES, (1, 2, 3))
    chosen = rates_of(found["runs"], "deepnorm")
    assert chosen == [(5e-4, 1), (5e-4, 2), (5e-4, 3)]
    assert [(rate, seed) for rate, seed in rates_of(found["not_chosen"], "deepnorm") if rate == 1e-3] == [
        (1e-3, 1),
        (1e-3, 2),
        (1e-3, 3),
    ]
    assert (2e-3, 2) not in rates_of(found["not_chosen"], "deepnorm")  # the third best has one seed
    assert len(lab.asked) == len({tuple(each.items()) for each in lab.asked})


@pytest.mark.parametrize("end", ["dead", "source_not_read", "diverged"])
def test_a_rate_at_which_a_run_dies_is_not_chosen(end: str) -> None:
    found = at_best_rate(MadeUp(ends={("deepnorm", 18, 1e-3): end}), "any", {}, SETTINGS, RATES, (1, 2))
    assert {rate for rate, _ in rates_of(found["runs"], "deepnorm", 18)} == {5e-4}
    assert {rate for rate, _ in rates_of(found["runs"], "deepnorm", 6)} == {1e-3}


def test_where_every_rate_dies_lower_ones_are_tried_and_the_cell_has_every_seed() -> None:
    ends = {("post_ln", 18, rate): "dead" for rate in (1.25e-4, 2.5e-4, *RATES)}
    found = at_best_rate(MadeUp(ends=ends), "any", {}, SETTINGS, RATES, (1, 2))
    tried = rates_of(found["runs"] + found["not_chosen"], "post_ln", 18)
    assert min(tried)[0] == 1.25e-4
    assert sorted(seed for _, seed in rates_of(found["runs"], "post_ln", 18)) == [1, 2]


def test_nothing_is_chosen_before_every_run_has_ended() -> None:
    lab = MadeUp(ends={("deepnorm", 18, 5e-4): "waiting"})
    found = at_best_rate(lab, "any", {}, SETTINGS, RATES, (1, 2))
    assert rates_of(found["runs"], "deepnorm", 18) == [(rate, 1) for rate in RATES]
    assert rates_of(found["not_chosen"], "deepnorm", 18) == []
    grid = grid_of(found["runs"], "model.recipe", "layers")
    assert [(recipe, layers) for recipe, cells in grid.items() for layers, cell in cells.items() if not cell.ended] == [
        ("deepnorm", 18)
    ]
    assert grid["deepnorm"][6].lives


def test_settings_may_differ_in_several_options_at_once() -> None:
    settings = [
        {"model.recipe": "post_ln", "layers": 6, "model.dim": 256},
        {"model.recipe": "deepnorm", "layers": 18, "model.dim": 128},
    ]
    found = at_best_rate(MadeUp(), "any", {}, settings, RATES, (1, 2))
    for setting, rate in zip(settings, (2.5e-4, 1e-3), strict=True):
        own = [run["options"] for run in found["runs"] if has(run, setting)]
        assert own == [{**setting, "train.lr": rate, "train.seed": seed} for seed in (1, 2)]


def test_a_recipe_with_options_has_a_row_of_its_own() -> None:
    recipe = {"name": "deepnorm", "alpha_scale": 2.0}
    run = {"options": {"model.recipe": recipe, "layers": 6}, "outcome": "finished", "text": ""}
    grid = grid_of([{**run, "loss": 1.0, "cost": 1.0, "bleu": None}], "model.recipe", "layers")
    assert list(grid) == ["deepnorm alpha_scale=2"]


def test_runs_of_another_session_are_taken_where_their_configuration_is_the_same(tmp_path: Path) -> None:
    config = {"train": {"steps": 1000}, "data": {"folder": "/somewhere/text", "directions": ["deu-eng"]}}
    elsewhere = {"train": {"steps": 1000}, "data": {"folder": "/else/where", "directions": ["deu-eng"]}}
    longer = {"train": {"steps": 2000}, "data": config["data"]}
    assert digest_of(config) == digest_of(elsewhere) != digest_of(longer)
    known = [
        {"options": {"train.seed": seed}, "outcome": outcome, "config": digest_of(config), "loss": 1.0}
        for seed, outcome in ((1, "finished"), (2, "dead"), (3, "waiting"))
    ]
    path = tmp_path / "found.json"
    path.write_text(json.dumps({"found": {"deep": [{"runs": known}]}}))
    assert [run["options"]["train.seed"] for run in earlier_runs(path)] == [1, 2]

    @dataclass(frozen=True)
    class Trains(Lab):
        trained: list[Mapping[str, Any]] = field(default_factory=list)

        def _train(self, name: str, config: Any, settings: Sequence[Mapping[str, Any]]) -> list[Run]:
            self.trained.extend(settings)
            return [{"options": dict(each), "outcome": "finished", "loss": 2.0} for each in settings]

    lab = Trains(tmp_path, earlier=earlier_runs(path))
    settings = [{"train.seed": seed} for seed in (3, 1, 4, 2)]
    found = lab.compare_settings("any", config, settings)
    assert [run["options"] for run in found] == settings
    assert [run["loss"] for run in found] == [2.0, 1.0, 2.0, 1.0]
    assert lab.trained == [{"train.seed": 3}, {"train.seed": 4}]
    assert {run["config"] for run in found} == {digest_of(config)}
    assert len(lab.compare_settings("any", longer, settings)) == len(settings)
    assert lab.trained[2:] == settings


def test_fine_tunings_of_two_models_are_not_taken_for_each_other() -> None:
    def start(path: str) -> dict[str, Any]:
        return {"examples": {"folder": "/data/glue"}, "train": {"lr": 1e-4, "start_from": path}}

    assert digest_of(start("/here/runs/post_ln-lr0.001")) == digest_of(start("/there/runs/post_ln-lr0.001"))
    assert digest_of(start("/here/runs/post_ln-lr0.001")) != digest_of(start("/here/runs/sub_ln-lr0.001"))


def test_what_was_read_from_a_folder_stays_with_the_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "words.txt").write_text("hello")

    def read(folder: Path) -> str:
        return (folder / "words.txt").read_text()

    run = {"options": {}, "outcome": "finished", "config": "any", "folder": str(tmp_path / "run")}
    assert keep(run, "words", read) == "hello"
    path = tmp_path / "found.json"
    path.write_text(json.dumps([run, {**run, "folder": str(tmp_path / "gone"), "words": "kept"}]))
    (tmp_path / "run").rename(tmp_path / "away")
    assert [keep(each, "words", read) for each in earlier_runs(path)] == ["hello", "kept"]
    assert keep({"folder": str(tmp_path / "run")}, "words", read) is None
