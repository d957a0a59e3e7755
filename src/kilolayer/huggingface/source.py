"""What is exported: a trained model, and what is known about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kilolayer.huggingface.task_export import TaskExport
from kilolayer.models.fold import AnyModel
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.registry import Registration


@dataclass(frozen=True)
class Source:
    """A trained model and what is known about it.

    folder, config: of its run. registration: of its task. weights: the checkpoints that they come from, in words. finished:
    whether training is. scores: the contents of scores.json; empty if the run was not scored. task: what the task adds.
    """

    folder: Path
    config: RunConfig
    registration: Registration
    model: AnyModel
    weights: str
    finished: bool
    scores: dict[str, Any]
    task: TaskExport[Any]

    @property
    def positions(self) -> int:
        """Number of positions of the exported model."""
        most = self.config.model.max_length
        return self.task.positions if most is None else most

    @property
    def labels(self) -> dict[str, Any]:
        """The class names of a classifier, as in config.json; empty if there are none."""
        classes = self.task.labels
        if not classes:
            return {}
        return {"id2label": dict(enumerate(classes)), "label2id": {name: index for index, name in enumerate(classes)}}
