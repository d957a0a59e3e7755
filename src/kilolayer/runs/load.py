"""Loads a run folder as a Python object."""

from __future__ import annotations

from os import PathLike

import torch

from kilolayer.errors import InputError
from kilolayer.runs.run import Precision, Run
from kilolayer.runs.trained_run import TrainedRun


def load(folder: str | PathLike[str], *, device: str | torch.device = "auto", precision: Precision = "fp32") -> TrainedRun:
    """Load the run in a folder, as the class of its task: `kl.load("runs/mine").translate(["A dog."])`.

    device, precision: where the model runs and in which precision, as for the command-line flags of these names.
    """
    run = Run.open(folder)
    return run_class(run)(run, device=device, precision=precision)


def run_class(run: Run) -> type[TrainedRun]:
    """The Python class for runs of this task, as its registration names it."""
    found = run.registration.load_run()
    if not (isinstance(found, type) and issubclass(found, TrainedRun)):
        raise InputError(
            f"{run.registration.run} is not a class of runs", where=f"task {run.config.task}", fix="let it extend kl.TrainedRun"
        )
    return found
