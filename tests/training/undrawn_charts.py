"""Pages with empty charts: to draw them takes most of the time of a command that trains a small run.

All tests run so; those of tests/report, and what else looks at a picture, draw.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from matplotlib.figure import Figure

EMPTY = '<svg viewBox="0 0 1 1"></svg>'
draw = Figure.savefig


@contextmanager
def undrawn_charts() -> Iterator[None]:
    """Figures are made as ever, but their SVG is empty."""

    def savefig(figure: Figure, file: Any, **options: Any) -> None:
        if options["format"] == "svg":
            file.write(EMPTY)
        else:
            draw(figure, file, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        yield


@contextmanager
def drawn_charts() -> Iterator[None]:
    """Within `undrawn_charts`, figures are drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", draw)
        yield
