"""What each of several processes does in the tests of training on them, and how it is started."""

from __future__ import annotations

import os
import signal
import warnings
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from kilolayer.cli.main import main
from kilolayer.errors import OptionError
from kilolayer.parallel.collectives import gather
from kilolayer.parallel.peers import Peers
from kilolayer.parallel.processes import Processes
from kilolayer.runs.run import Run
from kilolayer.runtime.recorder import Recorder
from kilolayer.speed.fast import compile_layers, fast_form
from kilolayer.speed.runtime import FastRuntime
from kilolayer.training.loop import train
from kilolayer.training.step import Stepper
from kilolayer.training.trainer import Trainer
from tests.fixtures.process_pool import ProcessPool
from tests.fixtures.small_runs import task_of

accumulate, take, record = Stepper.accumulate, Stepper.step, Recorder.run


def train_or_resume(group: dist.ProcessGroup, folder: Path, cache: str, code: int = 0) -> None:
    """Train a run, from its newest checkpoint where it has one."""
    os.environ["KILOLAYER_CACHE"] = cache
    run = Run.open(folder)
    assert train(run, task_of(run), resume=True, processes=Processes(group)) == code


def on(pool: ProcessPool, size: int, run: Run, function: Any = train_or_resume, *arguments: Any) -> None:
    """Train a run on several processes, or do to it what `function` does."""
    pool.run(function, size, run.folder, os.environ["KILOLAYER_CACHE"], *arguments)


def stop_at_step(group: dist.ProcessGroup, folder: Path, cache: str, step: int, rank: int) -> None:
    """Train until the process `rank` gets a signal in the middle of a step."""
    taken = 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken == step and dist.get_rank(group) == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(*arguments)

    with patch.object(Stepper, "step", interrupted):
        train_or_resume(group, folder, cache, code=143)


def stop_in_validation(group: dist.ProcessGroup, folder: Path, cache: str, run: int, ranks: tuple[int, ...]) -> None:
    """Train until some of the processes get a signal before a run of the recorder, counted from the first step on."""
    seen = 0

    def interrupted(recorder: Recorder, *arguments: Any, **options: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == run and dist.get_rank(group) in ranks:
            os.kill(os.getpid(), signal.SIGTERM)
        return record(recorder, *arguments, **options)

    with patch.object(Recorder, "run", interrupted):
        train_or_resume(group, folder, cache, code=143)


def spoil_a_batch(group: dist.ProcessGroup, folder: Path, cache: str, number: int, rank: int) -> None:
    """Train; the loss of one batch of one process is not a number."""
    seen = 0

    def spoiled(stepper: Stepper, *parts: Tensor) -> None:
        nonlocal seen
        seen += 1
        accumulate(stepper, *parts)
        if seen == number and dist.get_rank(group) == rank:
            stepper.totals += float("nan")

    with patch.object(Stepper, "accumulate", spoiled):
        train_or_resume(group, folder, cache)


def type_train(group: dist.ProcessGroup, folder: Path, cache: str, words: list[str], code: int) -> None:
    """What `kilolayer train` does where torchrun started it; FOLDER.RANK.out is what it printed."""
    os.environ["KILOLAYER_CACHE"] = cache
    rank = dist.get_rank(group)
    with (
        Path(f"{folder}.{rank}.out").open("w") as out,
        redirect_stdout(out),
        redirect_stderr(out),
        patch.object(Processes, "of_environment", lambda: nullcontext(Processes(group))),
    ):
        try:
            found = main(["train", *words])
        except SystemExit as ended:
            found = ended.code
    assert found == code, Path(f"{folder}.{rank}.out").read_text()


def check_communication(group: dist.ProcessGroup) -> None:
    """Numbers, tensors and noise."""
    processes, rank, size = Processes(group), dist.get_rank(group), dist.get_world_size(group)
    assert (processes.rank, processes.size, processes.first) == (rank, size, rank == 0)
    assert processes.total(2**40 + rank) == size * 2**40 + sum(range(size))
    assert processes.largest(rank * (size - rank)) == max(each * (size - each) for each in range(size))
    assert processes.broadcast_number(0.1 + rank) == 0.1
    summed, spread = torch.full((3, 2), 1.0 + rank), torch.full((), float(rank))
    processes.sum_([summed])
    processes.broadcast_([spread])
    assert bool((summed == sum(range(1, size + 1))).all())
    assert spread == 0
    noise = []
    for step in (1, 2, 1):
        processes.seed_noise(7, step)
        noise.append(torch.rand(()))
    assert noise[0] == noise[2] != noise[1]
    assert gather(noise[0], Peers.of(group)).unique().numel() == size


def check_turns(group: dist.ProcessGroup, folder: Path, failing: int | None) -> None:
    """Two machines of two processes, each with a cache that its first process fills; the process `failing` cannot."""
    processes, rank = Processes(group), dist.get_rank(group)
    machine, file = rank // 2, folder / f"cache-{rank // 2}"

    def take_turn() -> None:
        with processes.first_process_first():
            if rank == failing:
                raise OptionError("there is no text", fix="name it")
            assert not machine or (folder / "cache-0").exists(), "the first process comes before other machines"
            assert file.exists() == bool(rank % 2)
            file.touch()

    with patch.dict(os.environ, LOCAL_RANK=str(rank % 2)):
        if failing is None:
            take_turn()
        else:
            with pytest.raises(OptionError if rank == failing else SystemExit):
                take_turn()


def train_compiled(group: dist.ProcessGroup, folder: Path, cache: str, kinds: int) -> None:
    """Train with layers compiled as on a GPU; one function for each kind of layer must be enough."""

    def form(self: Any, model: Any, device: torch.device, say: Any, *, eager: bool, recompute: Any) -> Any:
        fast = fast_form(model, recompute)
        compile_layers(fast, "aot_eager")
        return self.bind(fast), Recorder(device)

    warnings.simplefilter("ignore")  # the compiler's own, for its developers
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with patch.object(FastRuntime, "training_form", form):
        train_or_resume(group, folder, cache)
    # Experts that get no row or a single one are compiled once more.
    assert kinds <= counters["stats"]["unique_graphs"] <= kinds + 4 * (Run.open(folder).config.model.moe is not None)


def train_in_fp64(group: dist.ProcessGroup, folder: Path, cache: str) -> None:
    """Train a run with all in fp64; with hybrid shards, two processes count as one machine."""
    torch.set_default_dtype(torch.float64)
    try:
        with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
            train_or_resume(group, folder, cache)
    finally:
        torch.set_default_dtype(torch.float32)


def train_until(group: dist.ProcessGroup, folder: Path, cache: str, steps: int, accumulate: int) -> None:
    """Go on until a step, as if the run ended there; one process alone does not share the model."""
    os.environ["KILOLAYER_CACHE"] = cache
    size = dist.get_world_size(group)
    run = Run.open(folder)
    shard = "none" if size == 1 else "full"
    options = replace(run.config.train, accumulate=accumulate, shard=shard)
    run = replace(run, config=replace(run.config, train=options))

    def stop(stepper: Stepper, *arguments: Any, **named: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken == steps and dist.get_rank(group) == 0 and steps < options.steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(stepper, *arguments, **named)

    taken = steps - 3
    with patch.object(Stepper, "step", stop):
        code = train(run, task_of(run), resume=True, processes=Processes(group) if size > 1 else None)
    assert code == (143 if steps < options.steps else 0)


def check_parts(group: dist.ProcessGroup, folder: Path, cache: str) -> None:
    """What each process holds: its rows of matrices, of their gradients and moments."""
    os.environ["KILOLAYER_CACHE"] = cache
    run = Run.open(folder)
    largest = [0]
    empty = torch.empty

    def counted(*shape: Any, **options: Any) -> Tensor:
        made = empty(*shape, **options)
        largest[0] = max(largest[0], made.numel() if made.device.type == "cpu" else 0)
        return made

    with patch.object(torch, "empty", counted):
        trainer = Trainer(run, task_of(run), Processes(group))
        trainer.begin(None)
    whole = {name: weight.numel() for name, weight in trainer.model.named_parameters()}
    for optimizer_group in trainer.optimizer.groups:
        for name, weight in zip(optimizer_group.names, optimizer_group.weights, strict=True):
            if optimizer_group.of_shards:
                assert weight.numel() <= -(-whole[name] // dist.get_world_size(group)) + weight.shape[-1]
            else:
                assert weight.dim() < 2, name
    layer = sum(size for name, size in whole.items() if name.startswith("decoder.blocks.0."))
    assert largest[0] <= max(layer, sum(whole.values()) / 3)  # what is gathered at once: a layer, or what is outside of them


def check_warnings(group: dist.ProcessGroup, folder: Path, cache: str) -> None:
    """FSDP2 warns of a module of a user's own that returns a view, in a process that also trains shards of ours."""
    os.environ["KILOLAYER_CACHE"] = cache
    run = Run.open(folder)
    Trainer(run, task_of(run), Processes(group))

    class Viewed(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).view(-1)

    theirs = fully_shard(Viewed(2, 2), mesh=DeviceMesh.from_group(group, "cpu"))
    theirs.set_force_sum_reduction_for_comms(True)  # gloo can only sum
    with pytest.warns(UserWarning, match=r"FSDP2-wrapped module \(FSDPViewed\) returned a view"):
        theirs(torch.ones(3, 2))


def check_refused(group: dist.ProcessGroup, folder: Path, cache: str, machines: tuple[int, ...], told: str) -> None:
    """A run that cannot be sharded so. machines: how many processes are on the machine of each process."""
    os.environ["KILOLAYER_CACHE"] = cache
    run = Run.open(folder)
    here = {"LOCAL_WORLD_SIZE": str(machines[dist.get_rank(group)])}
    with patch.dict(os.environ, here), pytest.raises(OptionError, match=told):
        Trainer(run, task_of(run), Processes(group))
