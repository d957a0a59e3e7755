"""Weights & Biases and MLflow as trackers of a run.

With this file's folder on the Python path (PYTHONPATH=examples) a run is followed by one of them, or by both:

    kilolayer train my.toml --train.trackers '["trackers:WeightsAndBiases", "trackers:MLflow"]'

A tracker of your own is a class with the same three methods; in Python, pass an object: kl.train(..., trackers=[MyTracker()]).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4


class WeightsAndBiases:
    """Curves and scores at wandb.ai; a resumed run continues the same curves."""

    def start(self, folder: Path, config: dict[str, Any], step: int) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        identity = kept(folder / "wandb.id", uuid4().hex)
        self.run = wandb.init(
            project="kilolayer", name=folder.name, id=identity, resume="allow", dir=str(folder), config=config
        )

    def log(self, row: Mapping[str, Any]) -> None:
        self.run.log(numbers(row), step=row["step"])

    def finish(self, scores: Mapping[str, Any] | None) -> None:
        self.run.summary.update(values(scores or {}))
        self.run.finish(exit_code=1 if scores is None else 0)


class MLflow:
    """Curves, options and scores at the tracking server that MLFLOW_TRACKING_URI names."""

    def start(self, folder: Path, config: dict[str, Any], step: int) -> None:
        import mlflow  # pyright: ignore[reportMissingImports]

        self.mlflow = mlflow
        known = (folder / "mlflow.id").exists()
        run = mlflow.start_run(run_id=kept(folder / "mlflow.id", "") if known else None, run_name=folder.name)
        kept(folder / "mlflow.id", run.info.run_id)
        if not known:
            mlflow.log_params(
                {f"{table}.{name}": value for table in ("model", "train") for name, value in config[table].items()}
            )

    def log(self, row: Mapping[str, Any]) -> None:
        self.mlflow.log_metrics(numbers(row), step=row["step"])

    def finish(self, scores: Mapping[str, Any] | None) -> None:
        self.mlflow.log_metrics(values(scores or {}))
        self.mlflow.end_run("KILLED" if scores is None else "FINISHED")


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics: train/loss."""
    return {f"{row['kind']}/{name}": value for name, value in row.items() if name != "step" and isinstance(value, int | float)}


def values(scores: Mapping[str, Any]) -> dict[str, float]:
    """The scores of each test set: test/bleu."""
    tests = {part: table for part, table in scores.items() if part.startswith("test") and isinstance(table, dict)}
    return {f"{part}/{name}": each["value"] for part, table in tests.items() for name, each in table.items() if "value" in each}


def kept(path: Path, text: str) -> str:
    """What a file holds; the text, which it holds from now on, where there is none."""
    if not path.exists():
        path.write_text(text)
    return path.read_text()
