"""What is exported: a run, its trained weights, and the number of positions that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kilolayer.convert.fold import AnyModel
from kilolayer.errors import InputError
from kilolayer.exporting.task_export import TaskExport
from kilolayer.files.paths import kind_of
from kilolayer.tasks.results import read_scores
from kilolayer.training import checkpoint
from kilolayer.training.chosen import Chosen, choose
from kilolayer.training.run import Run


@dataclass(frozen=True)
class Source:
    """A run and its trained model. scores: the contents of scores.json; empty if the run was not scored.

    task: what the run's task adds.
    """

    run: Run
    model: AnyModel
    chosen: Chosen
    scores: dict[str, Any]
    task: TaskExport[Any]

    @classmethod
    def of(cls, run: str | Path | Any) -> Source:
        """Open a run by its folder, or by an object that has a `folder`."""
        folder = getattr(run, "folder", run)
        if not isinstance(folder, str | Path):
            raise InputError(
                f"an object of the class {type(run).__name__} is not a run",
                where="export",
                fix="give a run folder, or a loaded run",
            )
        opened = Run.open(Path(folder))
        chosen = choose(opened.checkpoints, opened.config)
        model = opened.load_model(torch.device("cpu"), chosen)
        assert isinstance(model, AnyModel)
        scored = kind_of(opened.folder / "scores.json") is not None
        task = opened.registration.load_export()(opened)
        return cls(opened, model, chosen, read_scores(opened.folder) if scored else {}, task)

    @property
    def finished(self) -> bool:
        """Whether training is finished: scores are then written, even if the run stopped before its last step."""
        newest = checkpoint.step_of(checkpoint.steps(self.run.checkpoints)[-1])
        return bool(self.scores) or newest >= self.run.config.train.steps

    @property
    def positions(self) -> int:
        """Number of positions of the exported model."""
        most = self.run.config.model.max_length
        return self.task.positions if most is None else most

    @property
    def labels(self) -> dict[str, Any]:
        """The class names of a classifier, as in config.json; empty if there are none."""
        classes = self.task.labels
        if not classes:
            return {}
        return {"id2label": dict(enumerate(classes)), "label2id": {name: place for place, name in enumerate(classes)}}

    @property
    def weights(self) -> str:
        """Which checkpoints the weights come from, in words."""
        steps = ", ".join(map(str, self.chosen.steps))
        return f"step {steps}" if len(self.chosen.steps) == 1 else f"the mean of steps {steps}"
