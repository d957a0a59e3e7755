"""The page of a reproduction: the claim, the rule, what was measured beside what the paper prints, and the verdict."""

from __future__ import annotations

import json
from pathlib import Path

from kilolayer.errors import InputError
from kilolayer.files.reading import read_json
from kilolayer.files.writing import make_folder, write
from kilolayer.report.panels import Table
from kilolayer.report.templating import template
from kilolayer.reproduce.base import Found, Numbers, Reproduction, Verdict


def save(folder: Path, reproduction: Reproduction, found: Found, tiny: bool, embedded: bool = False) -> Verdict:
    """Write found.json, with the verdict, and the page; return the verdict.

    embedded: whether the text was the embedded corpus in the place of the one that the setting names.
    """
    verdict = reproduction.judge(found)
    make_folder(folder)
    document = {
        "name": reproduction.name,
        "source": reproduction.source,
        "claim": reproduction.claim,
        "setting": reproduction.setting,
        "rule": reproduction.rule,
        "command": f"kilolayer reproduce {reproduction.name}{' --tiny' if tiny else ''}",
        "embedded_text": tiny or embedded,
        "verdict": verdict.word,
        "why": verdict.why,
        "found": found,
    }
    write(folder / "found.json", json.dumps(document, indent=1) + "\n")
    text = template("reproduction.html").render(
        reproduction=reproduction,
        verdict=verdict,
        tiny=tiny,
        embedded=embedded,
        panels=reproduction.panels(found),
        measured=_table(reproduction.numbers(found)),
        published=None if reproduction.published is None else _table(reproduction.published),
    )
    write(folder / "page.html", text.encode("utf-8", "backslashreplace"))
    return verdict


def read_found(folder: Path) -> Found:
    """What an earlier measurement left."""
    path = folder / "found.json"
    document = read_json(path)
    if not isinstance(document, dict) or not isinstance(document.get("found"), dict):
        raise InputError("this holds no measurement", where=str(path), fix="remove it, and measure again")
    return document["found"]


def _table(numbers: Numbers) -> Table:
    return Table(list(numbers.header), [list(row) for row in numbers.rows])
