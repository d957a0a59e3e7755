"""What holds for a run of every task that is registered, whatever it is combined with.

`make test` takes cases in which each pair of values meets, two recipes alone; `make test-all` takes all of them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from kilolayer import recipes
from kilolayer.cli.main import main
from kilolayer.config import merge
from kilolayer.report.page import write_report
from kilolayer.runs.metrics import read_metrics
from kilolayer.tasks import registry
from kilolayer.training.loop import train
from tests.fixtures.process_pool import ProcessPool
from tests.fixtures.small_runs import SMALL, brings_model, last_checkpoint, new_run_of, stopped_and_resumed, task_of
from tests.training import shared_runs

CALIBRATED = next(name for name in recipes.names() if recipes.get(name).calibration() is not None)
THOROUGH = "sub_ln"
FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "experts": {"dense": {}, "sparse": {"model": {"moe": {"experts": 4, "every": 1}}}},
    "recipe": {name: {"model": {"recipe": name}} for name in (recipes.DEFAULT, CALIBRATED, THOROUGH)},
    "weights": {"best": {"train": {"valid_every": 2}}, "averaged": {"train": {"average": 2, "save_every": 2}}},
    "batches": {"one": {}, "two": {"train": {"accumulate": 2}}},
    "kept": {"all": {}, "inputs": {"train": {"recompute": "layer"}}},
}
Case = tuple[str, ...]


OWN_MODEL = ("dense", recipes.DEFAULT, None, None, "all")
"""What a task that brings its model has of the factors that are about Transformers; None: every value."""


def all_cases() -> list[Case]:
    return [case for case in product(sorted(SMALL), *FACTORS.values()) if not brings_model(case[0]) or fits_own_model(case[1:])]


def fits_own_model(chosen: Case) -> bool:
    return all(needed in (None, value) for needed, value in zip(OWN_MODEL, chosen, strict=True))


def pairwise(cases: Sequence[Case]) -> list[Case]:
    """Few of the cases, in which each pair of values of two factors meets."""

    def pairs(case: Case) -> set[tuple[tuple[int, str], ...]]:
        return set(combinations(enumerate(case), 2))

    missing = set().union(*map(pairs, cases))
    chosen: list[Case] = []
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def cases() -> list[Any]:
    quick = set(pairwise([case for case in all_cases() if THOROUGH not in case]))
    marks = {case: () if case in quick else pytest.mark.slow for case in all_cases()}
    return [pytest.param(case[0], case[1:], marks=marks[case], id=" ".join(case)) for case in all_cases()]


def sections(task: str, chosen: Case) -> dict[str, Any]:
    merged: dict[str, Any] = {"train": {"steps": 6, "keep": 9}}
    for values, name in zip(FACTORS.values(), chosen, strict=True):
        merged = merge(merged, values[name])
    return {name: table for name, table in merged.items() if name != "model" or not brings_model(task)}


def test_every_registered_task_is_tested_here() -> None:
    assert set(SMALL) == set(registry.names())


@pytest.mark.matrix(3)
@pytest.mark.parametrize(("task", "chosen"), cases())
def test_stopped_and_resumed_it_is_to_the_bit_the_run_that_was_not_and_is_scored_and_shown(
    task: str, chosen: Case, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, broken = (new_run_of(task, tmp_path / name, corpus, **sections(task, chosen)) for name in ("whole", "broken"))
    stopped_and_resumed(whole, broken, monkeypatch)
    losses = [row["loss"] for row in read_metrics(whole.folder) if row["kind"] == "train"]
    assert len(losses) == 6
    assert all(map(math.isfinite, losses))

    for run in (whole, broken):
        run.score(task_of(run), torch.device("cpu"))
    scores = [json.loads((run.folder / "scores.json").read_text()) for run in (whole, broken)]
    assert scores[0] == scores[1]
    assert scores[0]["weights"]["chosen"]
    capsys.readouterr()
    assert main(["evaluate", str(whole.folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["scores"]
    headline = registry.get(task).headline
    assert headline is not None
    assert all(headline.key in table for table in shown.values())
    page = write_report(whole.folder).path.read_text()
    assert headline.title.lower() in page.lower()
    assert ("Experts" in page) == (chosen[0] == "sparse")


@pytest.mark.parametrize("task", sorted(SMALL))
def test_it_is_planned(task: str, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = new_run_of(task, tmp_path / "run", corpus)
    assert main(["plan", str(run.folder / "config.toml"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    built = sum(weight.numel() for weight in task_model(run).parameters())
    assert plan["parameters"]["total"] == built
    assert plan["training_memory"]["peak"] > 0


def task_model(run: Any) -> torch.nn.Module:
    from kilolayer.models.build import build_model

    return build_model(run.config.model, device="meta")


@pytest.mark.parametrize(
    "task",
    [task if task == "masked_lm" else pytest.param(task, marks=pytest.mark.slow) for task in sorted(SMALL)],
)  # test_processes.py has translation and causal_lm in the quick tests
@pytest.mark.parametrize("experts", ["dense", pytest.param("sparse", marks=pytest.mark.slow)])
def test_two_processes_train_as_one_that_reads_both_batches(
    task: str, experts: str, tmp_path: Path, corpus: Path, pool: ProcessPool
) -> None:
    # With a larger eps an update is no amplifier of rounding.
    smooth: dict[str, Any] = {"train": {"eps": 1e-3, "lr": 1e-3, "steps": 4}}
    if not brings_model(task):
        smooth = merge(FACTORS["experts"][experts], {"model": {"dropout": 0.0}, **smooth})
    elif experts == "sparse":
        pytest.skip("a model of the task's own has no experts")
    one = new_run_of(task, tmp_path / "one", corpus, **merge(smooth, {"train": {"accumulate": 2}}))
    two = new_run_of(task, tmp_path / "two", corpus, **smooth)
    assert train(one, task_of(one)) == 0
    pool.run(shared_runs.train_or_resume, 2, two.folder, os.environ["KILOLAYER_CACHE"])
    expected, found = last_checkpoint(one).model, last_checkpoint(two).model
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5, msg=name)
