"""Training on several processes is training on one that reads all their batches."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kilolayer.config import dump, merge
from kilolayer.errors import OptionError
from kilolayer.parallel.processes import Processes
from kilolayer.runs import checkpoint
from kilolayer.runs.budget import Work, budget
from kilolayer.runs.lock import locked
from kilolayer.runs.metrics import read_metrics
from kilolayer.runs.run import Run
from kilolayer.training.loop import train
from kilolayer.training.trainer import Trainer
from tests.fixtures.process_pool import ProcessPool
from tests.fixtures.small_runs import bytes_of, last_checkpoint, new_run, new_text_run, record, table, task_of
from tests.training import shared_runs
from tests.training.shared_runs import on

# With a larger eps an update is no amplifier of rounding: gradients that are 0 but for it stay so.
SMOOTH = {"lr": 1e-3, "eps": 1e-3, "clip_norm": 0.5, "layers_every": 2, "valid_every": 3, "steps": 6}
ROUTED = {"experts": 4, "every": 1, "capacity": 1.0, "balance": 0.1, "z_loss": 0.01, "router_dim": 8}
EVENED = {"experts": 4, "top_k": 1, "loss_free": 0.01, "router": "linear"}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model": {"dropout": 0.0}},
    "sparse": {"model": {"dropout": 0.0, "moe": ROUTED}},
    "balanced": {"model": {"dropout": 0.0, "recipe": "admin", "moe": EVENED}},
}
SAMPLED = {"model": {"moe": {"experts": 4}}, "train": {"valid_bleu": True}, "search": {"method": "sample"}}
TIMES = ("seconds", "tokens_per_second")


def made(folder: Path, corpus: Path, model: str, **options: Any) -> Run:
    return new_run(folder, corpus, **merge(MODELS[model], {"train": {**SMOOTH, **options}}))


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from flat(each, f"{path}.{name}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from flat(each, f"{path}[{index}]")
    else:
        yield path, value


def assert_alike(found: Run, alone: Run) -> None:
    """Weights, moments, metrics and all that a checkpoint holds, to rounding."""
    ours, theirs = last_checkpoint(found), last_checkpoint(alone)
    assert ours.step == theirs.step
    for part in ("model", "optimizer"):
        mine, yours = getattr(ours, part), getattr(theirs, part)
        assert mine.keys() == yours.keys()
        for name in mine.keys() - {"random.cpu"}:
            torch.testing.assert_close(mine[name], yours[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    told = [[row for row in read_metrics(run.folder) if row["kind"] != "event"] for run in (found, alone)]
    states = [last_checkpoint(run).state for run in (found, alone)]
    rows = [dict(flat({"metrics": each, "state": state})) for each, state in zip(told, states, strict=True)]
    assert rows[0].keys() == rows[1].keys()
    for path in rows[0]:
        if not path.endswith((*TIMES, ".config")):  # it tells how many batches one process reads
            value = rows[1][path]
            rounding = 1e-5 if path.endswith(".source_gain") else 1e-6  # the difference of two losses
            expected = pytest.approx(value, rel=1e-5, abs=rounding) if isinstance(value, float) else value
            assert rows[0][path] == expected, path


@pytest.fixture(scope="module", params=MODELS)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[str, Run]:
    """One process that reads four batches per step."""
    run = made(tmp_path_factory.mktemp("alone") / "run", corpus, request.param, accumulate=4)
    assert train(run, task_of(run)) == 0
    return request.param, run


@pytest.mark.slow
def test_they_validate_by_translations_as_one_process_does(tmp_path: Path, corpus: Path, pool: ProcessPool) -> None:
    alone, shared = (made(tmp_path / str(count), corpus, "sparse", accumulate=count, valid_bleu=True) for count in (2, 1))
    assert train(alone, task_of(alone)) == 0
    on(pool, 2, shared)
    assert_alike(shared, alone)
    assert all("bleu" in row for row in read_metrics(shared.folder) if row["kind"] == "valid")


SGD = {"name": "torch.optim:SGD", "momentum": 0.9}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", pytest.param(SGD, marks=pytest.mark.slow)])
def test_other_optimizers_train_shared_experts_as_one_process_does(
    tmp_path: Path, corpus: Path, pool: ProcessPool, optimizer: Any
) -> None:
    options = {name: value for name, value in SMOOTH.items() if optimizer == "muon" or name != "eps"}
    alone, shared = (
        new_run(
            tmp_path / name,
            corpus,
            **merge(MODELS["sparse"], {"train": {**options, "optimizer": optimizer, "accumulate": accumulate}}),
        )
        for name, accumulate in (("alone", 2), ("shared", 1))
    )
    assert train(alone, task_of(alone)) == 0
    on(pool, 2, shared)
    assert_alike(shared, alone)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_they_train_as_one_process_does(
    tmp_path: Path, corpus: Path, pool: ProcessPool, alone: tuple[str, Run], size: int
) -> None:
    run = made(tmp_path / "run", corpus, alone[0], accumulate=4 // size)
    on(pool, size, run)
    assert_alike(run, alone[1])
    rows = read_metrics(run.folder)
    assert sum(row["kind"] == "layers" for row in rows) == 4
    assert any(row.get("clipped") for row in rows)


@pytest.mark.parametrize("make", [new_run, new_text_run])
def test_each_takes_every_second_batch_of_the_stream(tmp_path: Path, corpus: Path, make: Any) -> None:
    run = make(tmp_path / "run", corpus, train={"accumulate": 2})
    task = task_of(run)
    stream = task.training_batches(run.config.train.seed)
    batches = [next(stream) for _ in range(80)]  # more than an epoch
    for rank in range(2):
        trainer = Trainer(run, task)
        trainer.processes.rank, trainer.processes.size = rank, 2
        taken = [batch for _ in range(20) for batch in trainer.take_batches()]
        assert [bytes_of(batch.parts[0]) for batch in taken] == [bytes_of(batch.parts[0]) for batch in batches[rank::2]]
        assert trainer.batches.state() == stream.state()
        assert trainer.batches.epoch > 0


@pytest.mark.parametrize(("model", "rank"), [("dense", 1), pytest.param("sparse", 0, marks=pytest.mark.slow)])
def test_a_signal_to_one_stops_all_and_the_run_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path, corpus: Path, pool: ProcessPool, model: str, rank: int
) -> None:
    noisy = {"model": {"dropout": 0.2}, "train": {"save_every": 100}}
    whole, broken = (new_run(tmp_path / name, corpus, **merge(MODELS[model], noisy)) for name in ("whole", "broken"))
    on(pool, 2, whole)
    on(pool, 2, broken, shared_runs.stop_at_step, 3, rank)
    assert last_checkpoint(broken).step == 3
    on(pool, 2, broken)
    assert record(broken) == record(whole)


OTHERS = [("dense", (0, 1)), ("sparse", (0,)), ("sparse", (0, 1))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ranks"), [("dense", (1,)), *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_a_signal_to_any_of_them_ends_a_validation_of_all(
    tmp_path: Path, corpus: Path, pool: ProcessPool, model: str, ranks: tuple[int, ...]
) -> None:
    noisy = {"model": {"dropout": 0.2}, "train": {"valid_every": 3}}
    whole, broken = (new_run(tmp_path / name, corpus, **merge(MODELS[model], noisy)) for name in ("whole", "broken"))
    on(pool, 2, whole)
    on(pool, 2, broken, shared_runs.stop_in_validation, 3 + 2, ranks)  # three steps, and the second batch of the validation
    last = last_checkpoint(broken)
    assert (last.step, last.state["validated"]) == (3, 0)
    on(pool, 2, broken)
    assert record(broken) == record(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "size"),
    [("sparse", 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("dense", 2), ("balanced", 2)))],
)
def test_another_number_of_processes_goes_on_from_their_checkpoint(
    tmp_path: Path, corpus: Path, pool: ProcessPool, model: str, size: int
) -> None:
    shared = made(tmp_path / "shared", corpus, model)
    on(pool, 4, shared, shared_runs.stop_at_step, 3, 2)
    on(pool, size, shared)
    alone = made(tmp_path / "alone", corpus, model, accumulate=4, save_every=3, keep=9)
    train(alone, task_of(alone))
    shutil.rmtree(checkpoint.steps(alone.checkpoints)[-1])
    config = alone.folder / "config.toml"
    config.write_text(config.read_text().replace("accumulate = 4", f"accumulate = {size}"))
    alone = Run.open(alone.folder)
    assert train(alone, task_of(alone), resume=True) == 0
    assert_alike(shared, alone)
    assert alone.load_model(torch.device("cpu")).state_dict().keys() == last_checkpoint(shared).model.keys()


@pytest.mark.slow
def test_what_is_not_finite_on_one_is_skipped_by_all(tmp_path: Path, corpus: Path, pool: ProcessPool) -> None:
    """The third step counts for nothing but its place in the data."""
    run = made(tmp_path / "run", corpus, "balanced", steps=3, save_every=2, keep=9, layers_every=0)
    on(pool, 2, run, shared_runs.spoil_a_batch, 3, 1)
    before, after = (checkpoint.load(path) for path in checkpoint.steps(run.checkpoints))
    assert (before.step, after.step) == (2, 3)
    for part in ("model", "optimizer"):
        for name, tensor in getattr(before, part).items():
            assert name == "random.cpu" or torch.equal(getattr(after, part)[name], tensor), name
    assert after.state["batches"]["index"] == 6
    assert [row["text"] for row in read_metrics(run.folder) if row["kind"] == "event"] == [
        "step 3 skipped: the loss is not finite"
    ]


@pytest.mark.slow
def test_frozen_experts_in_less_precision_stay_in_the_checkpoint_as_they_were(
    tmp_path: Path, corpus: Path, pool: ProcessPool
) -> None:
    other = made(tmp_path / "other", corpus, "sparse", steps=1)
    assert train(other, task_of(other)) == 0
    options = {"precision": "bf16", "freeze": "experts", "start_from": str(other.folder), "steps": 2}
    run = made(tmp_path / "run", corpus, "sparse", **options)
    on(pool, 2, run)
    start, end = last_checkpoint(other).model, last_checkpoint(run).model
    assert any(".experts." in name for name in start)
    for name, tensor in start.items():
        assert torch.equal(end[name], tensor) == (".experts." in name or ".router." in name), name


def printed(run: Path, size: int) -> list[list[str]]:
    return [Path(f"{run}.{rank}.out").read_text().splitlines() for rank in range(size)]


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("size", "sections", "words", "told"),
    [
        (2, {}, ["--train.lrr", "1"], "unknown option 'lrr'"),
        (2, {"data": {"test": "missing"}}, [], "missing"),
        (4, {"model": {"moe": {"experts": 6}}}, [], "6 experts cannot be shared evenly by 4 processes"),
        (2, SAMPLED, [], "samples cannot be drawn while several processes share the model"),
        (2, {**SAMPLED, "model": {}}, ["--train.shard", "full"], "samples cannot be drawn"),
    ],
    ids=["option", "text", "experts", "BLEU", "BLEU of shards"],
)
def test_a_mistake_is_told_once(
    tmp_path: Path, corpus: Path, pool: ProcessPool, size: int, sections: dict[str, Any], words: list[str], told: str
) -> None:
    (tmp_path / "run.toml").write_text(dump(table(corpus, **sections)))
    words = [str(tmp_path / "run.toml"), "--run", str(tmp_path / "run"), *words]
    pool.run(shared_runs.type_train, size, tmp_path / "run", os.environ["KILOLAYER_CACHE"], words, 2)
    first, *others = printed(tmp_path / "run", size)
    assert told in first[0]
    assert len(first) <= 3
    assert others == [[]] * (size - 1)
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.slow
def test_the_command_trains_scores_and_speaks_once(tmp_path: Path, corpus: Path, pool: ProcessPool) -> None:
    (tmp_path / "run.toml").write_text(dump(table(corpus, **MODELS["sparse"], train={"valid_every": 3})))
    folder, cache = tmp_path / "run", os.environ["KILOLAYER_CACHE"]
    pool.run(shared_runs.type_train, 2, folder, cache, [str(tmp_path / "run.toml"), "--run", str(folder)], 0)
    first, others = printed(folder, 2)
    assert others == []
    assert "2 processes, 2 batches per step" in first
    assert first[-1].startswith("BLEU")
    assert {"scores.json", "report.html", "log.txt", "test.en-de.txt"} < {path.name for path in folder.iterdir()}
    run = Run.open(folder)
    cost = budget(run.config.model, Work(1, 4))
    assert f"{cost.parameters / 1e6:.2f} M parameters, {cost.active_parameters / 1e6:.2f} M active, on" in first[0]

    pool.run(shared_runs.type_train, 4, folder, cache, ["--resume", str(folder)], 0)
    first, *others = printed(folder, 4)
    assert "nothing to do" in first[0]
    assert others == [[], [], []]
    with locked(folder):
        pool.run(shared_runs.type_train, 2, folder, cache, ["--resume", str(folder)], 2)
    first, others = printed(folder, 2)
    assert "in use by process" in first[0]
    assert others == []


def test_all_hear_the_same_and_draw_their_own(pool: ProcessPool) -> None:
    pool.run(shared_runs.check_communication, 4)


@pytest.mark.parametrize("failing", [None, 0, 2])
def test_the_first_process_of_each_machine_fills_its_cache(tmp_path: Path, pool: ProcessPool, failing: int | None) -> None:
    pool.run(shared_runs.check_turns, 4, tmp_path, failing)


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    processes = Processes()
    processes.check(torch.device("cuda"))
    processes.size = 2
    processes.check(torch.device("cpu"))
    with pytest.raises(OptionError, match="2 processes cannot share 1 GPU\n"):
        processes.check(torch.device("cuda"))


@pytest.mark.slow
def test_an_eps_that_hides_gradients_is_told_once_by_processes_that_share_experts(
    tmp_path: Path, corpus: Path, pool: ProcessPool
) -> None:
    options: dict[str, Any] = {"steps": 12, "log_every": 5, "eps": 1e3}
    batches = {"one": 2, "two": 1}
    runs = [made(tmp_path / name, corpus, "sparse", accumulate=each, **options) for name, each in batches.items()]
    train(runs[0], task_of(runs[0]))
    on(pool, 2, runs[1])
    told = [[(row["step"], row["text"]) for row in read_metrics(run.folder) if row["kind"] == "event"] for run in runs]
    assert told[0] == told[1]
    assert [step for step, text in told[0] if "train.eps hides" in text] == [10, 10]
