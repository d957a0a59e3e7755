"""The scores of a run on any text; its own test part is scored by `Run.scores`."""

from __future__ import annotations

from typing import Any

from kilolayer.models.model import Model
from kilolayer.tasks.other_text import OtherText
from kilolayer.training.chosen import choose
from kilolayer.training.run import Run, cache_folder, choose_device


def score_text(run: Run, text: OtherText, *, device: str = "auto", model: Model | None = None) -> dict[str, Any]:
    """Tables as in scores.json, one for each part of the text, and `weights`, the checkpoints that were scored.

    Nothing is written. model: the run's own, where it is loaded already.
    """
    score = run.registration.load().read_text(run.config, run.vocabulary(), text, cache_folder())
    chosen = choose(run.checkpoints, run.config.train)
    model = model or run.load_reader(choose_device(device), chosen=chosen)
    return {**score(model), "weights": chosen.table()}
