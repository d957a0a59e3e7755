"""What a test leaves in a run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kilolayer.files.writing import write


def write_results(
    folder: Path, samples: Sequence[Mapping[str, str]], scores: Mapping[str, Any], weights: Mapping[str, Any] | None = None
) -> None:
    """samples.json, texts for the report, and scores.json: a table of scores for each test part, and what explains them.

    weights: which of the run's checkpoints were scored.
    """
    write(folder / "samples.json", json.dumps(samples, indent=1, ensure_ascii=False))
    # Last: a run with this file is finished.
    write(folder / "scores.json", json.dumps({**scores, **({} if weights is None else {"weights": weights})}, indent=1))
