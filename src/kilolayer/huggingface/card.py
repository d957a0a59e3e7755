"""The README.md of an exported folder: what the model is, its scores, and example code."""

from __future__ import annotations

import json
import re
from typing import Any

from kilolayer.huggingface.source import Source
from kilolayer.huggingface.task_export import TRUST
from kilolayer.report.scores_section import show_score
from kilolayer.tasks.results import VALIDATION
from kilolayer.version import VERSION

TRUSTED = f"Loading needs `{TRUST}`: the class is in a file of this folder, which needs only torch and Transformers."
CODE = re.compile("[a-z]{2,3}")
"""The codes of languages that the Hugging Face Hub knows."""


def card(source: Source, name: str, why: str, use: str) -> str:
    """The text of the README. name: of the class, or the software. why: the reason for it. use: Python code, run in the
    parent folder."""
    config = source.config.model
    unfinished = "" if source.finished else " The run is not finished."
    title = source.registration.title
    what = f"{config.depths.title}, {config.widths}, recipe {config.recipe.title}. Weights of {source.weights}.{unfinished}"
    lines = [
        *_header(source, name),
        f"# {source.folder.resolve().name}",
        "",
        f"{title[:1].upper()}{title[1:]} trained by Kilolayer {VERSION}: {what}",
        f"For {name}: {why}.",
        *([TRUSTED] if TRUST in use else []),
        "",
        *_scores(source),
        "```python",
        use,
        "```",
        *source.task.notes(name),
    ]
    return "\n".join(lines) + "\n"


def _header(source: Source, name: str) -> list[str]:
    """What the Hugging Face Hub reads: YAML, in which JSON's lists and texts are valid."""
    header: dict[str, Any] = {"library_name": "ctranslate2" if name == "CTranslate2" else "transformers"}
    if source.task.pipeline:
        header["pipeline_tag"] = source.task.pipeline
    header["tags"] = ["kilolayer", source.config.model.recipe.name]
    if source.task.languages:
        header["language"] = [each for each in source.task.languages if CODE.fullmatch(each)]
    return ["---", *(f"{key}: {json.dumps(value)}" for key, value in header.items()), "---", ""]


def _scores(source: Source) -> list[str]:
    main = source.registration.headline
    rows = [
        f"- {part}: {score['name']} {show_score(key, score, main)} (`{score['signature']}`)"
        for part, table in source.scores.items()
        if part.startswith("test") or part == VALIDATION
        for key, score in table.items()
        if "value" in score
    ]
    return [*rows, ""] if rows else []
