"""Training a model in shards is training the whole one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.cli.main import main
from kilolayer.config import build, dump, merge
from kilolayer.errors import OptionError, UnusedOptionError
from kilolayer.probe.diagnose import diagnose
from kilolayer.runs.metrics import read_metrics
from kilolayer.runs.run import Run
from kilolayer.tasks.config import RunConfig
from kilolayer.training.loop import train
from kilolayer.training.trainer import Trainer
from tests.fixtures.process_pool import ProcessPool
from tests.fixtures.small_classifiers import created
from tests.fixtures.small_runs import LAYERED, SMALL, last_checkpoint, new_run, new_run_of, new_text_run, table, task_of
from tests.training import shared_runs
from tests.training.shared_runs import on
from tests.training.test_processes import EVENED, ROUTED, SMOOTH, TIMES, assert_alike, flat

STEPS = 20
OF_SHARDS = ("shard", "shard_unit", "reshard_after_forward")


def pair(folder: Path, corpus: Path, size: int, *, make: Any = new_run, **sections: Any) -> tuple[Run, Run]:
    """The same run, of one process that reads the batches of `size`, and of `size` processes that share its model."""
    common = merge({"model": {"dropout": 0.0}, "train": SMOOTH}, sections)
    shard = {name: common["train"].pop(name) for name in OF_SHARDS if name in common["train"]}
    batches = size * common["train"].get("accumulate", 1)
    alone = make(folder / "alone", corpus, **merge(common, {"train": {"accumulate": batches}}))
    return alone, make(folder / "shards", corpus, **merge(common, {"train": {"shard": "full", **shard}}))


@pytest.fixture
def precise() -> Iterator[None]:
    """All in fp64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def assert_equal_in_fp64(found: Run, expected: Run) -> None:
    """Losses, measurements by layer, weights and moments after 20 steps."""
    ours, theirs = last_checkpoint(found), last_checkpoint(expected)
    assert ours.step == theirs.step == STEPS
    for mine, yours in ((ours.model, theirs.model), (ours.optimizer, theirs.optimizer)):
        assert mine.keys() == yours.keys()
        for name in mine.keys() - {"random.cpu"}:
            assert mine[name].dtype == yours[name].dtype
            torch.testing.assert_close(mine[name], yours[name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    rows = [
        [row for row in read_metrics(run.folder) if row["kind"] in ("train", "layers", "valid")] for run in (found, expected)
    ]
    assert len(rows[0]) == len(rows[1]) > 2 * STEPS
    ours, theirs = (dict(flat(each)) for each in rows)
    assert ours.keys() == theirs.keys()
    assert any(".gradient." in name for name in ours)
    for name in ours:
        if not name.endswith((*TIMES, ".epoch")):
            # What is measured by layer is written with six digits.
            rel = 1e-5 if isinstance(ours[name], float) and any(part in name for part in MEASURED) else 1e-9
            assert ours[name] == (
                pytest.approx(theirs[name], rel=rel, abs=1e-12) if isinstance(ours[name], float) else theirs[name]
            ), name


MEASURED = (".gradient.", ".update.", ".residual.", "logit.")
LONG = {**SMOOTH, "steps": STEPS, "layers_every": 1, "valid_every": 10}
SHAPES = {"encoder-decoder": new_run, "decoder": new_text_run}


@pytest.mark.matrix(7)
@pytest.mark.parametrize("recipe", kl.recipes.names())
def test_every_recipe_in_fp64(tmp_path: Path, corpus: Path, pool: ProcessPool, precise: None, recipe: str) -> None:
    alone, shards = pair(tmp_path, corpus, 2, model={"recipe": recipe}, train=LONG)
    assert train(alone, task_of(alone)) == 0
    on(pool, 2, shards, shared_runs.train_in_fp64)
    assert_equal_in_fp64(shards, alone)


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    ("size", "make", "sections"),
    [
        pytest.param(4, new_run, {"model": {"tie_embeddings": "none"}}, id="four", marks=pytest.mark.slow),
        pytest.param(2, new_text_run, {"model": {"positions": "rotary", "qk_norm": True}}, id="decoder"),
        pytest.param(2, new_run, {"train": {"accumulate": 2, "shard_unit": 2}}, id="accumulated"),
        pytest.param(2, new_run, {"train": {"accumulate": 2, "reshard_after_forward": False}}, id="kept"),
        pytest.param(2, new_run, {"train": {"recompute": "layer"}}, id="recomputed"),
        pytest.param(2, new_run, {"train": {"recompute": "selective"}}, id="recomputed-selectively", marks=pytest.mark.slow),
        pytest.param(2, new_run, {"model": {"moe": ROUTED}}, id="sparse"),
        pytest.param(4, new_run, {"model": {"recipe": "admin", "moe": EVENED}}, id="sparse-admin", marks=pytest.mark.slow),
        pytest.param(4, new_run, {"model": {"moe": {**ROUTED, "experts": 6}}}, id="pairs-of-experts", marks=pytest.mark.slow),
        pytest.param(
            *(4, new_run, {"model": {"recipe": "sub_ln", "moe": {**EVENED, "experts": 3}}}),
            id="every-expert",
            marks=pytest.mark.slow,
        ),
        pytest.param(2, new_run, {"train": {"optimizer": "radam", "weight_decay": 0.1, "layer_decay": 0.9}}, id="radam"),
        pytest.param(4, new_run, {"train": {"shard": "hybrid"}}, id="hybrid", marks=pytest.mark.slow),
        pytest.param(4, new_run, {"model": {"dim": 2, "heads": 1, "ffn_dim": 3}}, id="no-rows-on-some"),
    ],
)
def test_shapes_and_options_in_fp64(
    tmp_path: Path, corpus: Path, pool: ProcessPool, precise: None, size: int, make: Any, sections: dict[str, Any]
) -> None:
    alone, shards = pair(tmp_path, corpus, size, make=make, **merge({"train": LONG}, sections))
    assert train(alone, task_of(alone)) == 0
    on(pool, size, shards, shared_runs.train_in_fp64)
    assert_equal_in_fp64(shards, alone)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("task", LAYERED)
def test_every_task(tmp_path: Path, corpus: Path, pool: ProcessPool, task: str) -> None:
    alone, shards = pair(tmp_path, corpus, 2, make=lambda *given, **tables: new_run_of(task, *given, **tables))
    assert train(alone, task_of(alone)) == 0
    on(pool, 2, shards)
    assert_alike(shards, alone)


@pytest.mark.parametrize(
    ("size", "make", "sections", "kinds"),
    [
        pytest.param(2, new_text_run, {}, 1, id="decoder"),
        pytest.param(2, new_run, {}, 2, id="encoder-decoder", marks=pytest.mark.slow),
        pytest.param(2, new_text_run, {"model": {"moe": ROUTED}}, 3, id="sparse", marks=pytest.mark.slow),
        pytest.param(
            4, new_run, {"model": {"moe": {**ROUTED, "experts": 6}}}, 6, id="pairs-of-experts", marks=pytest.mark.slow
        ),
        pytest.param(
            *(
                4,
                new_text_run,
                {"model": {"recipe": "sub_ln", "moe": {**EVENED, "experts": 3}}, "train": {"recompute": "layer"}},
                4,
            ),
            id="every-expert-recomputed",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_compiled_layers_gather_shards(
    tmp_path: Path, corpus: Path, pool: ProcessPool, size: int, make: Any, sections: dict[str, Any], kinds: int
) -> None:
    alone, shards = pair(tmp_path, corpus, size, make=make, **merge({"train": {"layers_every": 0}}, sections))
    assert train(alone, task_of(alone)) == 0
    on(pool, size, shards, shared_runs.train_compiled, kinds)
    assert_alike(shards, alone)


@pytest.mark.slow
@pytest.mark.parametrize("rounded", [{"precision": "bf16"}, {"precision": "bf16", "residual": "bf16"}, {"precision": "fp16"}])
def test_rounded_products_keep_full_shards(tmp_path: Path, corpus: Path, pool: ProcessPool, rounded: dict[str, str]) -> None:
    alone, shards = pair(tmp_path, corpus, 2, train={**rounded, "steps": STEPS})
    assert train(alone, task_of(alone)) == 0
    on(pool, 2, shards)
    losses = [[row["loss"] for row in read_metrics(run.folder) if row["kind"] == "train"] for run in (shards, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert all(tensor.dtype == torch.float32 for tensor in last_checkpoint(shards).model.values())


@pytest.mark.parametrize(
    ("sizes", "moe"),
    [
        ((2, 1), None),
        pytest.param((4, 2, 1, 4), None, marks=pytest.mark.slow),
        pytest.param((4, 2, 4), {**ROUTED, "experts": 6}, marks=pytest.mark.slow),
    ],
)
def test_any_number_of_processes_goes_on(
    tmp_path: Path, corpus: Path, pool: ProcessPool, sizes: tuple[int, ...], moe: dict[str, Any] | None
) -> None:
    most, model = max(sizes), {"dropout": 0.0, **({} if moe is None else {"moe": moe})}
    training = {**SMOOTH, "steps": 3 * len(sizes)}
    alone = new_run(tmp_path / "alone", corpus, model=model, train={**training, "accumulate": most})
    assert train(alone, task_of(alone)) == 0
    run = new_run(tmp_path / "run", corpus, model=model, train={**training, "shard": "full"})
    for stage, size in enumerate(sizes, 1):
        on(pool, size, run, shared_runs.train_until, 3 * stage, most // size)
    assert_alike(run, alone)


@pytest.mark.slow
def test_they_validate_by_translations_as_one_process_does(tmp_path: Path, corpus: Path, pool: ProcessPool) -> None:
    alone, shards = pair(tmp_path, corpus, 2, train={"valid_bleu": True})
    assert train(alone, task_of(alone)) == 0
    on(pool, 2, shards)
    assert_alike(shards, alone)
    assert all("bleu" in row for row in read_metrics(shards.folder) if row["kind"] == "valid")


@pytest.mark.slow
def test_they_start_from_a_run_of_another_task(tmp_path: Path, corpus: Path, pool: ProcessPool) -> None:
    start = new_run_of("masked_lm", tmp_path / "start", corpus, train={"steps": 3})
    assert train(start, task_of(start)) == 0

    def make(folder: Path, corpus: Path, **tables: Any) -> Run:
        tables = merge(tables, {"model": {"vocab_size": start.config.model.vocab_size}})
        return created(folder, SMALL["classify"](corpus, **tables), start.vocabulary())

    alone, shards = pair(tmp_path, corpus, 2, make=make, train={"start_from": str(start.folder)})
    assert train(alone, task_of(alone)) == 0
    on(pool, 2, shards)
    assert_alike(shards, alone)


def test_no_process_holds_the_whole(tmp_path: Path, corpus: Path, pool: ProcessPool) -> None:
    _, shards = pair(tmp_path, corpus, 4)
    on(pool, 4, shards, shared_runs.check_parts)


def test_views_of_other_models_are_still_warned_of(tmp_path: Path, corpus: Path, pool: ProcessPool) -> None:
    _, shards = pair(tmp_path, corpus, 2)
    on(pool, 2, shards, shared_runs.check_warnings)


@pytest.mark.parametrize(
    ("train_options", "told"),
    [
        ({"shard_unit": 2}, "shard_unit has no effect"),
        ({"reshard_after_forward": False}, "reshard_after_forward has no effect"),
        ({"shard": "full", "optimizer": "muon"}, "needs whole matrices"),
        ({"shard": "full", "optimizer": "torch.optim:SGD"}, "needs whole matrices"),
    ],
)
def test_what_cannot_be_sharded_is_refused(tmp_path: Path, corpus: Path, train_options: dict[str, Any], told: str) -> None:
    with pytest.raises((OptionError, UnusedOptionError), match=told):
        new_run(tmp_path / "run", corpus, train=train_options)


def test_one_process_has_nobody_to_share_with(tmp_path: Path, corpus: Path) -> None:
    run = new_run(tmp_path / "run", corpus, train={"shard": "full"})
    with pytest.raises(OptionError, match="torchrun"):
        Trainer(run, task_of(run))


def test_units_are_checked(tmp_path: Path, corpus: Path, pool: ProcessPool) -> None:
    run = new_run(tmp_path / "run", corpus, train={"shard": "full", "shard_unit": 3})
    on(pool, 2, run, shared_runs.check_refused, (2, 2), "a unit of 3 layers is larger than the deepest stack")


@pytest.mark.parametrize("machines", [(3, 3, 3, 1), (1, 1, 1, 1), (2, 2, 1, 1)])
def test_machines_with_different_numbers_of_processes_are_refused_on_all(
    tmp_path: Path, corpus: Path, pool: ProcessPool, machines: tuple[int, ...]
) -> None:
    """machines: how many processes are on the machine of each process."""
    run = new_run(tmp_path / "run", corpus, train={"shard": "hybrid"})
    on(pool, 4, run, shared_runs.check_refused, machines, "hybrid shards need machines with equally many processes")


def test_one_machine_that_is_left_of_several_goes_on(tmp_path: Path, corpus: Path, pool: ProcessPool) -> None:
    alone, shards = pair(tmp_path, corpus, 2, train={"shard": "hybrid"})
    assert train(alone, task_of(alone)) == 0
    on(pool, 2, shards)
    assert_alike(shards, alone)
    assert "there is one machine" in (shards.folder / "log.txt").read_text()


def test_a_sharded_configuration_is_diagnosed_on_one_process(corpus: Path) -> None:
    config = build(RunConfig, table(corpus, train={"shard": "full", "shard_unit": 2}))
    assert diagnose(config, steps=1, device="cpu").measured.changes


def test_one_process_is_refused_before_a_folder_is_there(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(dump(table(corpus, train={"shard": "full"})))
    assert main(["train", str(tmp_path / "run.toml"), "--run", str(tmp_path / "run")]) == 2
    assert "nobody to share the model with" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_command_trains_experts_that_do_not_divide(tmp_path: Path, corpus: Path, pool: ProcessPool) -> None:
    (tmp_path / "run.toml").write_text(dump(table(corpus, model={"moe": {"experts": 6}}, train={"shard": "full"})))
    words = [str(tmp_path / "run.toml"), "--run", str(tmp_path / "run")]
    pool.run(shared_runs.type_train, 4, tmp_path / "run", os.environ["KILOLAYER_CACHE"], words, 0)
    assert (tmp_path / "run" / "scores.json").exists()
