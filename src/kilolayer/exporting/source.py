"""What is exported: a run, its trained weights, and the number of positions that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kilolayer.convert.fold import AnyModel
from kilolayer.errors import InputError
from kilolayer.files.paths import kind_of
from kilolayer.tasks.causal_lm.config import CausalLMConfig
from kilolayer.tasks.classify.config import ClassifyConfig
from kilolayer.tasks.masked_lm.config import MaskedLMConfig
from kilolayer.tasks.results import read_scores
from kilolayer.tasks.translation.config import TranslationConfig
from kilolayer.training import checkpoint
from kilolayer.training.chosen import Chosen, choose
from kilolayer.training.run import Run

LEAST_POSITIONS, MOST_POSITIONS = 1024, 4096
"""Bounds on the size of a table written for sinusoidal positions, which are unlimited."""


@dataclass(frozen=True)
class Source:
    """A run and its trained model. scores: the contents of scores.json; empty if the run was not scored."""

    run: Run
    model: AnyModel
    chosen: Chosen
    scores: dict[str, Any]

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
        return cls(opened, model, chosen, read_scores(opened.folder) if scored else {})

    @property
    def finished(self) -> bool:
        """Whether training is finished: scores are then written, even if the run stopped before its last step."""
        newest = checkpoint.step_of(checkpoint.steps(self.run.checkpoints)[-1])
        return bool(self.scores) or newest >= self.run.config.train.steps

    @property
    def positions(self) -> int:
        """Number of positions of the exported model: as many as the run itself may read and write, within bounds."""
        config = self.run.config
        if config.model.max_length is not None:
            return config.model.max_length
        if isinstance(config, TranslationConfig):
            longest = max(config.search.max_source_length, config.search.max_length(config.search.max_source_length))
            return min(max(longest, LEAST_POSITIONS), MOST_POSITIONS)
        if isinstance(config, CausalLMConfig):
            return max(config.text.length, LEAST_POSITIONS)
        return LEAST_POSITIONS

    @property
    def word_pieces(self) -> bool:
        """Whether the vocabulary is WordPiece, as in an imported BERT encoder."""
        config = self.run.config
        return isinstance(config, MaskedLMConfig | ClassifyConfig) and config.tokenizer.kind == "wordpiece"

    @property
    def labels(self) -> dict[str, Any]:
        """The class names of a classifier, as in config.json; empty if there are none."""
        config = self.run.config
        if not isinstance(config, ClassifyConfig) or not config.examples.classes:
            return {}
        classes = config.examples.classes
        return {"id2label": dict(enumerate(classes)), "label2id": {name: place for place, name in enumerate(classes)}}

    @property
    def weights(self) -> str:
        """Which checkpoints the weights come from, in words."""
        steps = ", ".join(map(str, self.chosen.steps))
        return f"step {steps}" if len(self.chosen.steps) == 1 else f"the mean of steps {steps}"
