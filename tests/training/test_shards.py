"""Training a model in shards is training the whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kilolayer.config import merge
from kilolayer.runs.metrics import read_metrics
from kilolayer.runs.run import Run
from kilolayer.training.loop import train
from tests.fixtures.process_pool import ProcessPool
from tests.fixtures.small_runs import last_checkpoint, new_run, new_text_run, task_of
from tests.training.test_processes import ROUTED, SMOOTH, assert_alike, on

FULL = {"shard": "full"}


def pair(folder: Path, corpus: Path, size: int, *, make: Any = new_run, **sections: Any) -> tuple[Run, Run]:
    """The same run, of one process that reads `size` batches a step, and of `size` processes that share its model."""
    common = merge({"model": {"dropout": 0.0}, "train": SMOOTH}, sections)
    shard = {name: common["train"].pop(name) for name in ("shard", "shard_unit") if name in common["train"]}
    alone = make(folder / "alone", corpus, **merge(common, {"train": {"accumulate": size}}))
    return alone, make(folder / "shards", corpus, **merge(common, {"train": {**FULL, **shard}}))


@pytest.mark.parametrize("recipe", ["deepnorm", "rezero", "admin"])
def test_shards_train_as_the_whole_model(tmp_path: Path, corpus: Path, pool: ProcessPool, recipe: str) -> None:
    alone, shards = pair(tmp_path, corpus, 2, model={"recipe": recipe})
    assert train(alone, task_of(alone)) == 0
    on(pool, 2, shards)
    assert_alike(shards, alone)
