"""A training loop of one's own: copies (DDP) and shards (FSDP2) train what one process trains."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import kilolayer as kl
from tests.fixtures.process_pool import ProcessPool
from tests.parallel import own_loops

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize(("recipe", "experts"), [("deepnorm", 0), ("sub_ln", 2)])
def test_two_processes_train_what_one_trains(
    pair: ProcessPool, parallel: str, recipe: str, experts: int, tmp_path: Path
) -> None:
    pair.run(own_loops.check_equal_to_one_process, 2, parallel, recipe, experts, str(tmp_path / "saved"))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("recipe", kl.recipes.names())
def test_every_recipe_trains_on_two_processes(pair: ProcessPool, parallel: str, recipe: str, tmp_path: Path) -> None:
    pair.run(own_loops.check_equal_to_one_process, 2, parallel, recipe, 0, str(tmp_path / "saved"))


def test_the_script_trains_and_saves_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["own_loop.py", "--steps", "20", "--recipe", "admin", "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", words)
    runpy.run_path(str(ROOT / "examples/own_loop.py"), run_name="__main__")
    losses = [float(line.partition("loss ")[2].partition(",")[0]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < losses[0]
    assert kl.load_model(tmp_path / "out")(torch.ones(1, 3, dtype=torch.int64)).logits.isfinite().all()
