"""The page of a reproduction: the claim, the rule, the measurements next to the paper's numbers, and the verdict."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from kilolayer.files.writing import make_folder, write
from kilolayer.report.templating import template
from kilolayer.reproduce.base import Found, Reproduction, Verdict
from kilolayer.version import VERSION


def save(folder: Path, reproduction: Reproduction, found: Found, tiny: bool) -> Verdict:
    """Write found.json, with the verdict, and the page; return the verdict."""
    verdict = reproduction.judge(found)
    make_folder(folder)
    shown = {key: getattr(reproduction, key) for key in ("name", "source", "claim", "setting", "rule")}
    document = {
        **shown,
        "instrument": reproduction.instrument,
        "command": f"kilolayer reproduce {reproduction.name}{' --tiny' if tiny else ''}",
        "made_with": _environment(),
        "verdict": verdict.word,
        "why": verdict.why,
        "found": plain(found),
    }
    write(folder / "found.json", json.dumps(document, indent=1) + "\n")
    text = template("reproduction.html").render(
        reproduction=shown | {"setting": " ".join(filter(None, (reproduction.setting, reproduction.instrument)))},
        verdict=verdict,
        tiny=tiny,
        panels=reproduction.panels(found),
        measured=reproduction.numbers(found),
        published=reproduction.published,
    )
    write(folder / "page.html", text.encode("utf-8", "backslashreplace"))
    return verdict


def _environment() -> dict[str, str]:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"kilolayer": VERSION, "torch": torch.__version__, "device": device}


def plain(value: Any) -> Any:
    """The value for JSON; numbers that are not finite become null."""
    match value:
        case dict():
            return {key: plain(each) for key, each in value.items()}
        case list() | tuple():
            return [plain(each) for each in value]
        case float() if not math.isfinite(value):
            return None
        case _:
            return value
