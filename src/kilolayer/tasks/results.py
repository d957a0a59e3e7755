"""What a test leaves in a run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_results(folder: Path, samples: Sequence[Mapping[str, str]], scores: Mapping[str, Any]) -> None:
    """samples.json, texts for the report, and scores.json: a table of scores for each test part, and what explains them."""
    (folder / "samples.json").write_text(json.dumps(samples, indent=1, ensure_ascii=False), encoding="utf-8")
    # Last and at once: a run with this file is finished.
    partial = folder / "scores.partial"
    partial.write_text(json.dumps(scores, indent=1), encoding="utf-8")
    partial.replace(folder / "scores.json")
