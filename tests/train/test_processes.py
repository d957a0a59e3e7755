"""Training on several processes is training on one that reads all their batches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import shared_runs
import torch
from process_pool import ProcessPool
from small_runs import last_checkpoint, new_run, task_of

from kilolayer.config import merge
from kilolayer.train.loop import train
from kilolayer.train.metrics import read_metrics
from kilolayer.train.run import Run

# With a larger eps an update is no amplifier of rounding: gradients that are 0 but for it stay so.
SMOOTH = {"eps": 1e-3, "clip_norm": 0.5, "layers_every": 2, "valid_every": 3, "steps": 6}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model": {"dropout": 0.0}},
    "sparse": {"model": {"dropout": 0.0, "moe": {"experts": 4, "every": 1, "capacity": 1.0, "balance": 0.1, "z_loss": 0.01}}},
    "balanced": {"model": {"dropout": 0.0, "recipe": "admin", "moe": {"experts": 4, "top_k": 1, "loss_free": 0.01}}},
}
TIMES = ("seconds", "tokens_per_second")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    processes = ProcessPool(tmp_path_factory.mktemp("processes"))
    yield processes
    processes.stop()


def made(folder: Path, corpus: Path, model: str, **options: Any) -> Run:
    return new_run(folder, corpus, **merge(MODELS[model], {"train": {**SMOOTH, **options}}))


def on(pool: ProcessPool, size: int, run: Run, function: Any = shared_runs.go_on, *arguments: Any) -> None:
    pool.run(function, size, run.folder, os.environ["KILOLAYER_CACHE"], *arguments)


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from flat(each, f"{path}.{name}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from flat(each, f"{path}[{index}]")
    else:
        yield path, value


def assert_alike(found: Run, expected: Run) -> None:
    """Weights, moments, metrics and all that a checkpoint holds, to rounding."""
    ours, theirs = last_checkpoint(found), last_checkpoint(expected)
    assert ours.step == theirs.step
    for part in ("model", "optimizer"):
        mine, yours = getattr(ours, part), getattr(theirs, part)
        assert mine.keys() == yours.keys()
        for name in mine.keys() - {"random.cpu"}:
            torch.testing.assert_close(mine[name], yours[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    rows = [dict(flat({"metrics": read_metrics(run.folder), "state": last_checkpoint(run).state})) for run in (found, expected)]
    assert rows[0].keys() == rows[1].keys()
    for path in rows[0]:
        if not path.endswith(TIMES):
            value = rows[1][path]
            assert rows[0][path] == (pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value), path


@pytest.fixture(scope="module", params=MODELS)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[str, Run]:
    """One process that reads four batches a step."""
    run = made(tmp_path_factory.mktemp("alone") / "run", corpus, request.param, accumulate=4)
    assert train(run, task_of(run)) == 0
    return request.param, run


@pytest.mark.parametrize("size", [2, 4])
def test_they_train_as_one_process_does(
    tmp_path: Path, corpus: Path, pool: ProcessPool, alone: tuple[str, Run], size: int
) -> None:
    run = made(tmp_path / "run", corpus, alone[0], accumulate=4 // size)
    on(pool, size, run)
    assert_alike(run, alone[1])
    rows = read_metrics(run.folder)
    assert sum(row["kind"] == "layers" for row in rows) == 4
    assert any(row.get("clipped") for row in rows)
