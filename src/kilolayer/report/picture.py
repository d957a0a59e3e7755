"""A picture of pixels in a report."""

from __future__ import annotations

import re
from typing import Any

from markupsafe import Markup

from kilolayer.report.panel import Panel

BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")


def picture_panel(png: Any, title: str, description: str) -> Panel | None:
    """A panel with a PNG file in base64, as wide as the page; None if it is not one."""
    if not isinstance(png, str) or not BASE64.fullmatch(png):
        return None
    shown = Markup('<img src="data:image/png;base64,{}" alt="{}" style="width: 100%; image-rendering: pixelated">').format(
        png, description
    )
    return Panel(shown, title, is_wide=True)
