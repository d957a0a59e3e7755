"""What each of several processes does in the tests of training on them."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from kilolayer.cli.main import main
from kilolayer.parallel.collectives import gather
from kilolayer.parallel.group import ExpertGroup
from kilolayer.parallel.processes import Processes
from kilolayer.runs.run import Run
from kilolayer.runtime.recorder import Recorder
from kilolayer.training.loop import train
from kilolayer.training.step import Stepper
from tests.fixtures.small_runs import task_of

accumulate, take, record = Stepper.accumulate, Stepper.step, Recorder.run


def train_or_resume(group: dist.ProcessGroup, folder: Path, cache: str, code: int = 0) -> None:
    """Train a run, from its newest checkpoint where it has one."""
    os.environ["KILOLAYER_CACHE"] = cache
    run = Run.open(folder)
    assert train(run, task_of(run), resume=True, processes=Processes(group)) == code


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
    assert gather(noise[0], ExpertGroup.of(group)).unique().numel() == size
