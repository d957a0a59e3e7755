"""Comparisons (`kilolayer compare`) of single settings, for benchmarks whose runs are no grid, and their results as rows.

At the limit of time runs under way stop with a checkpoint, and those that wait are left out; the same command goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kilolayer.compare.comparison import Comparison
from kilolayer.compare.documents import write_documents
from kilolayer.compare.grid import LAYERS, nested, same
from kilolayer.compare.queue import run_all
from kilolayer.compare.result import Result
from kilolayer.config import merge, overrides

Setting = Mapping[str, Any]


def train_all(
    work: Path,
    config: Path,
    settings: Mapping[str, Setting],
    seconds: float,
    parallel: int,
    options: Setting | None = None,
    typed: Sequence[str] = (),
) -> dict[str, Result]:
    """What became of each of `settings`, in a comparison in the folder `work`; options: of all runs.

    typed: options of `kilolayer train` for all runs, which also go before those of a setting.
    """
    shared = merge(nested(options or {}), overrides(typed))
    own = {
        name: {each: value for each, value in setting.items() if not _typed(each, typed)} for name, setting in settings.items()
    }
    comparison = Comparison.make_or_extend(work, config, options=shared, settings=list(own.values()))
    if code := run_all(comparison, parallel, seconds):
        raise SystemExit(code)
    write_documents(comparison)
    results = comparison.results()
    return {name: next(each for each in results if same(each.options, setting)) for name, setting in own.items()}


def words_of(config: Path, setting: Setting) -> list[str]:
    """Behind `kilolayer train`."""
    return [str(config), *(f"--{'model.layers' if name == LAYERS else name}={value}" for name, value in setting.items())]


def row_of(result: Result) -> dict[str, Any]:
    """Validations, the last row of training, skipped steps, scores, and what became of the run."""
    valid = [{key: value for key, value in row.items() if key != "kind"} for row in result.valid]
    if not result.train:
        return {"steps": 0, "valid": valid, "outcome": result.outcome.text}
    last = result.train[-1]
    return {
        "steps": last["step"],
        "seconds": round(last["seconds"], 1),
        "loss": last["nll"],
        "skipped": sum(row["skipped"] for row in result.train),
        "valid": valid,
        "scores": result.scores.get("test"),
        "outcome": result.outcome.text,
    }


def hardware() -> str:
    """The device in words."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def _typed(name: str, typed: Sequence[str]) -> bool:
    """Whether an option is among those that were typed."""
    names = {word.removeprefix("--").partition("=")[0] for word in typed if word.startswith("--")}
    return name in names or (name == LAYERS and bool(names & {"model.layers", "model.encoder_layers", "model.decoder_layers"}))
