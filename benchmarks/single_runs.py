"""Run comparisons (`kilolayer compare`) of individual settings that do not form a grid, and return results as rows.

At the time limit, active runs stop with a checkpoint and waiting runs are not started; the same command continues.
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
    """Train all `settings` as a comparison in the folder `work`, and return the result of each. options: for all runs.

    typed: options of `kilolayer train` for all runs, which also override those of a setting.
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
    """The arguments of `kilolayer train`."""
    return [str(config), *(f"--{'model.layers' if name == LAYERS else name}={value}" for name, value in setting.items())]


def row_of(result: Result) -> dict[str, Any]:
    """Validations, the last training metrics, skipped steps, scores, and the outcome of a run."""
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
    """A description of the device."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def _typed(name: str, typed: Sequence[str]) -> bool:
    """Whether an option was given on the command line."""
    names = {word.removeprefix("--").partition("=")[0] for word in typed if word.startswith("--")}
    return name in names or (name == LAYERS and bool(names & {"model.layers", "model.encoder_layers", "model.decoder_layers"}))
