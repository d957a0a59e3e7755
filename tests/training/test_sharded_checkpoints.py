"""Runs in shards save rows side by side; any number of processes goes on from them, and all that reads a run reads them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import kilolayer as kl
from kilolayer.config import merge
from kilolayer.files.saved_tensors import SavedTensors
from kilolayer.models.sharded import is_shard
from kilolayer.models.shards import local, row_range
from kilolayer.parallel.processes import Processes
from kilolayer.runs import checkpoint
from kilolayer.runs.run import Run
from kilolayer.training.loop import train
from kilolayer.training.trainer import Trainer
from tests.fixtures.process_pool import ProcessPool
from tests.fixtures.small_classifiers import created
from tests.fixtures.small_runs import SMALL, last_checkpoint, new_run, new_run_of, new_text_run, task_of
from tests.training import shared_runs
from tests.training.shared_runs import on
from tests.training.test_processes import ROUTED, SMOOTH, assert_alike
from tests.training.test_shards import pair

FULL = {"shard": "full"}
PARTS = "model-00001-of-0000{}.safetensors"


def edit(run: Run, **options: Any) -> Run:
    """The run with other options in [train]."""
    path = run.folder / "config.toml"
    lines = path.read_text().splitlines()
    for name, value in options.items():
        line = f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}".replace("'", '"')
        lines = [line if each.startswith(f"{name} = ") else each for each in lines]
        assert line in lines
    path.write_text("\n".join(lines) + "\n")
    return Run.open(run.folder)


def files_of(path: Path) -> set[str]:
    return {each.name for each in path.iterdir()}


SPARSE = {"model": {"moe": ROUTED}}


@pytest.mark.parametrize("sections", [{}, pytest.param(SPARSE, marks=pytest.mark.slow), {"train": {"precision": "bf16"}}])
def test_four_then_two_then_one_then_four_go_on_as_one_that_was_never_stopped(
    tmp_path: Path, corpus: Path, pool: ProcessPool, sections: dict[str, Any]
) -> None:
    """From shards to fewer shards, to the whole model, and to shards again."""
    alone, shards = pair(tmp_path, corpus, 4, **merge({"train": {"steps": 8, "valid_every": 100}}, sections))
    assert train(alone, task_of(alone)) == 0
    for size, step in ((4, 2), (2, 2), (1, 2), (4, None)):
        shards = edit(shards, shard="none" if size == 1 else "full", accumulate=4 // size)
        if step is None:
            on(pool, size, shards)
        else:
            on(pool, size, shards, shared_runs.stop_at_step, step, size - 1)
        newest = checkpoint.steps(shards.checkpoints)[-1]
        assert ("model.safetensors" if size == 1 else PARTS.format(size)) in files_of(newest)
        assert len(files_of(newest)) == 2 * size + 2
    if "precision" in sections.get("train", {}):
        ours, theirs = last_checkpoint(shards), last_checkpoint(alone)
        assert {name: tensor.dtype for name, tensor in ours.model.items()} == {
            name: tensor.dtype for name, tensor in theirs.model.items()
        }
        for name, tensor in theirs.model.items():
            torch.testing.assert_close(ours.model[name], tensor, rtol=0.05, atol=0.01)
    else:
        assert_alike(shards, alone)


def save_both(group: dist.ProcessGroup, folder: Path, cache: str, number: int) -> None:
    """Train, and keep beside each tensor that is saved in rows the whole one, gathered by torch."""
    state = Trainer.state

    def gathered(trainer: Trainer) -> checkpoint.Checkpoint:
        whole = {
            name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # pyright: ignore[reportCallIssue]
            for name, tensor in trainer.model.state_dict().items()
        }
        if trainer.processes.first:
            torch.save(whole, folder / f"gathered-{number}.pt")
        return state(trainer)

    with patch.object(Trainer, "state", gathered):
        shared_runs.train_or_resume(group, folder, cache)


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_saved_in_rows_is_the_whole_model(tmp_path: Path, corpus: Path, pool: ProcessPool, size: int) -> None:
    run = new_run(tmp_path / "run", corpus, train={**FULL, "steps": 2}, model={"recipe": "rezero"})
    on(pool, size, run, save_both, 1)
    saved = last_checkpoint(run)
    gathered = torch.load(run.folder / "gathered-1.pt", weights_only=True)
    assert saved.model.keys() == gathered.keys()
    for name, tensor in gathered.items():
        assert torch.equal(saved.model[name], tensor), name
    assert any(tensor.ndim == 0 for tensor in gathered.values())


def test_a_run_in_shards_that_is_resumed_has_the_same_bits(tmp_path: Path, corpus: Path, pool: ProcessPool) -> None:
    noisy = {"model": {"dropout": 0.2}, "train": FULL}
    whole, broken = (new_run(tmp_path / name, corpus, **noisy) for name in ("whole", "broken"))
    on(pool, 2, whole)
    on(pool, 2, broken, shared_runs.stop_at_step, 3, 1)
    on(pool, 2, broken)
    ours, theirs = last_checkpoint(broken), last_checkpoint(whole)
    for part in ("model", "optimizer"):
        for name, tensor in getattr(theirs, part).items():
            assert torch.equal(getattr(ours, part)[name], tensor), name


def resume_and_count(group: dist.ProcessGroup, folder: Path, cache: str) -> None:
    """Go on, and count what is read: this process's rows, and never more of one tensor at a time than all of it."""
    largest = max(tensor.nbytes for tensor in last_checkpoint(Run.open(folder)).optimizer.values())
    read: list[int] = []
    rows, whole = SavedTensors.rows, SavedTensors.__getitem__

    def counted(tensors: SavedTensors, name: str, *wanted: Any) -> torch.Tensor:
        found = rows(tensors, name, *wanted) if wanted else whole(tensors, name)
        read.append(found.nbytes)
        return found

    with patch.object(SavedTensors, "rows", counted), patch.object(SavedTensors, "__getitem__", counted):
        shared_runs.train_or_resume(group, folder, cache)
    newest = checkpoint.steps(Run.open(folder).checkpoints)[-1]
    own = sum((newest / f"{kind}-00001-of-00004.safetensors").stat().st_size for kind in ("model", "optimizer"))
    assert max(read) <= largest
    assert 0 < sum(read) <= own + largest


def start_and_count(group: dist.ProcessGroup, folder: Path, cache: str, start: Path) -> None:
    """Begin a run that starts from another one, and count what is read of that one's weights, in files and in rows."""
    os.environ["KILOLAYER_CACHE"] = cache
    run, read, rows = Run.open(folder), list[int](), SavedTensors.rows

    def counted(tensors: SavedTensors, name: str, wanted: range) -> torch.Tensor:
        read.append((found := rows(tensors, name, wanted)).nbytes)
        return found

    def whole(tensors: SavedTensors, name: str) -> torch.Tensor:
        return counted(tensors, name, range(tensors.parts[name][0].shape[0]))

    trainer = Trainer(run, task_of(run), Processes(group))
    with (
        patch.object(SavedTensors, "rows", counted),
        patch.object(SavedTensors, "__getitem__", whole),
        patch.object(checkpoint, "load_tensors", lambda *_, **__: pytest.fail("a whole file is read")),
    ):
        trainer.begin(None)
    theirs = last_checkpoint(Run.open(start)).model
    own = sum(local(tensor).nbytes for name, tensor in trainer.model.state_dict().items() if name in theirs)
    assert 0 < sum(read) <= own
    for name, tensor in trainer.model.state_dict().items():
        if not name.startswith("head."):
            rows_here = theirs[name][row_range(tensor).start : row_range(tensor).stop] if is_shard(tensor) else theirs[name]
            assert torch.equal(local(tensor), rows_here), name


@pytest.mark.parametrize("shard", ["none", "full"])
def test_a_process_reads_its_rows_alone_of_what_it_starts_from(
    tmp_path: Path, corpus: Path, pool: ProcessPool, shard: str
) -> None:
    """shard: that of the run to start from, of which a classifier takes all but the outputs."""
    start = new_run_of("masked_lm", tmp_path / "start", corpus, train={"steps": 2, "shard": shard})
    on(pool, 1 if shard == "none" else 4, start)

    def make(folder: Path, corpus: Path, **tables: Any) -> Run:
        tables = merge(tables, {"model": {"vocab_size": start.config.model.vocab_size}})
        return created(folder, SMALL["classify"](corpus, **tables), start.vocabulary())

    run = make(tmp_path / "run", corpus, train={**FULL, "start_from": str(start.folder)})
    on(pool, 4, run, start_and_count, start.folder)


@pytest.mark.parametrize("before", ["whole", "shards"])
def test_a_process_reads_its_rows_alone(tmp_path: Path, corpus: Path, pool: ProcessPool, before: str) -> None:
    run = new_run(tmp_path / "run", corpus, train={**FULL, "steps": 2, "keep": 9})
    if before == "whole":
        run = edit(run, shard="none")
        assert train(run, task_of(run)) == 0
        run = edit(run, shard="full")
    else:
        on(pool, 2, run)
    on(pool, 4, edit(run, steps=3), resume_and_count)
    assert PARTS.format(4) in files_of(checkpoint.steps(run.checkpoints)[-1])


def on_two_machines(group: dist.ProcessGroup, folder: Path, cache: str) -> None:
    with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        shared_runs.train_or_resume(group, folder, cache)


@pytest.mark.parametrize("sparse", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_of_several_copies_the_first_is_saved_and_experts_of_each(
    tmp_path: Path, corpus: Path, pool: ProcessPool, sparse: bool
) -> None:
    sections = merge({"train": {"shard": "hybrid"}}, SPARSE if sparse else {})
    alone, shards = pair(tmp_path, corpus, 4, **sections)
    assert train(alone, task_of(alone)) == 0
    on(pool, 4, shards, on_two_machines)
    newest = checkpoint.steps(shards.checkpoints)[-1]
    assert PARTS.format(4 if sparse else 2) in files_of(newest)
    assert_alike(shards, alone)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path, pool: ProcessPool) -> tuple[Run, Run]:
    """A run of two processes in shards with three checkpoints, and the same with whole ones."""
    folder = tmp_path_factory.mktemp("trained")
    options = {"steps": 6, "save_every": 2, "keep": 9, "average": 2}
    shards = new_run(folder / "shards", corpus, train={**SMOOTH, **options, **FULL})
    on(pool, 2, shards)
    whole = shutil.copytree(shards.folder, folder / "whole")
    for path in checkpoint.steps(whole / "checkpoints"):
        found = checkpoint.load(path)
        checkpoint.save(whole / "checkpoints", checkpoint.Checkpoint(found.step, found.model, found.optimizer, found.state))
    return shards, Run.open(whole)


def test_all_that_reads_a_run_reads_rows(tmp_path: Path, trained: tuple[Run, Run], corpus: Path) -> None:
    shards, whole = trained
    assert PARTS.format(2) in files_of(checkpoint.steps(shards.checkpoints)[-1])
    assert files_of(checkpoint.steps(whole.checkpoints)[-1]) == {*checkpoint.FILES, "manifest.json"}
    ours, theirs = (kl.load(run.folder, device="cpu") for run in trained)
    for name, tensor in theirs.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], tensor), name
    lines = ["the dog sees a cat", "a man"]
    assert ours.translate(lines) == theirs.translate(lines)
    assert ours.scores()["test"] == theirs.scores()["test"]
    exported = [kl.export(run.folder, to="huggingface", out=tmp_path / run.folder.name).folder for run in trained]
    weights = [(folder / "model.safetensors").read_bytes() for folder in exported]
    assert weights[0] == weights[1]
    found = [kl.diagnose(run.folder) for run in trained]
    assert found[0].measured == found[1].measured
    assert [change.step for change in found[0].measured.changes] == [2, 3, 4, 6]
    started = [
        new_run(tmp_path / f"from-{run.folder.name}", corpus, train={"start_from": str(run.folder), "steps": 1})
        for run in trained
    ]
    for run in started:
        assert train(run, task_of(run)) == 0
    for name, tensor in last_checkpoint(started[1]).model.items():
        assert torch.equal(last_checkpoint(started[0]).model[name], tensor), name


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, corpus: Path, pool: ProcessPool) -> None:
    run, other = (
        new_text_run(tmp_path / str(width), corpus, model={"dim": width}, train={**FULL, "steps": 1}) for width in (16, 32)
    )
    on(pool, 2, other)
    shutil.copytree(other.checkpoints, run.checkpoints)
    with pytest.raises(
        AssertionError, match=r"the checkpoint does not fit the configuration: .* is .*32.* there and .*16.* here"
    ):
        on(pool, 2, run)


@pytest.mark.slow
def test_frozen_experts_stay_as_they_were_in_parts_and_in_whole_checkpoints(
    tmp_path: Path, corpus: Path, pool: ProcessPool
) -> None:
    start = new_run(tmp_path / "start", corpus, **merge(SPARSE, {"train": {"steps": 3}}))
    assert train(start, task_of(start)) == 0
    options = {"start_from": str(start.folder), "freeze": "experts", "precision": "bf16", "steps": 9}
    _, run = pair(tmp_path, corpus, 2, **merge(SPARSE, {"train": options}))
    for shard in ("full", "none", "full"):
        run = edit(run, shard=shard)
        on(pool, 2, run, shared_runs.stop_at_step, 2, 1)
        found, expected = last_checkpoint(run).model, last_checkpoint(start).model
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor) == (".experts." in name or ".router." in name), name
