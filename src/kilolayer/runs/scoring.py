"""Scores a run on any text; its own test set is scored by `Run.scores`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kilolayer.models.model import Model
from kilolayer.runs.chosen import Chosen, choose
from kilolayer.runs.run import Run, cache_folder, choose_device
from kilolayer.tasks.other_text import OtherText


def score_text(
    run: Run, text: OtherText, *, device: str = "auto", loaded: tuple[Chosen, Callable[[], Model]] | None = None
) -> dict[str, Any]:
    """Tables as in scores.json, one for each part of the text, and `weights`, the checkpoints that were scored.

    Nothing is written. loaded: the checkpoints of an already loaded model, and a function that returns it; by default the run's
    own are loaded.
    """
    score = run.registration.load().read_text(run.config, run.vocabulary(), text, cache_folder())
    if loaded is None:
        chosen = choose(run.checkpoints, run.config)
        model = run.load_reader(choose_device(device, "device"), chosen=chosen)
    else:
        chosen, load = loaded
        model = load()
    return {**score(model), "weights": chosen.table()}
