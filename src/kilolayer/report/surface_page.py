"""Writes a loss surface: an HTML page, the plot as SVG and PNG, and the numbers as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from kilolayer.files.writing import json_value, make_folder, write
from kilolayer.report.contour import contour_figure
from kilolayer.report.facts import Fact
from kilolayer.report.figure import Series, as_file, to_png, to_svg
from kilolayer.report.numbers import show_number
from kilolayer.report.panel import Panel
from kilolayer.report.plots import line_plot
from kilolayer.report.table import Table
from kilolayer.report.templating import template

STEEP = 4.0
"""The ratio of the highest to the lowest loss from which the scale is logarithmic."""
HIGHEST = 100.0
"""Losses above this multiple of the lowest have one colour: those of a diverged model, up to 1e30, would hide all others."""


@dataclass(frozen=True)
class SurfaceView:
    """The contents of a surface page. loss: [len(y)][len(x)], in `unit` per label.

    name: of the run or configuration. values: further values for the JSON. path: [points, 2], and steps: [points], of a
    trajectory; empty without one.
    """

    name: str
    title: str
    x: np.ndarray
    y: np.ndarray
    loss: np.ndarray
    unit: str
    axes: tuple[str, str]
    facts: list[Fact]
    values: dict[str, Any]
    path: Sequence[tuple[float, float]] = ()
    steps: Sequence[int] = ()


@dataclass(frozen=True)
class SurfaceFiles:
    """The paths of the files; `pictures` is empty if no loss is finite."""

    page: Path
    data: Path
    pictures: list[Path]


def write_surface(folder: Path, stem: str, view: SurfaceView) -> SurfaceFiles:
    """Write STEM.html, STEM.json and, if any loss is finite, STEM.svg and STEM.png."""
    make_folder(folder)
    data, page = folder / f"{stem}.json", folder / f"{stem}.html"
    write(data, json.dumps(as_json(view), indent=1))
    pictures: list[Path] = []
    svg = None
    if (figure := _figure(view)) is not None:
        svg = to_svg(figure, "surface", f"{view.title} of {view.name}")
        pictures = [folder / f"{stem}.svg", folder / f"{stem}.png"]
        write(pictures[0], as_file(svg))
        write(pictures[1], to_png(figure))
    # Folder names may contain lone surrogates, which UTF-8 cannot encode.
    write(page, render(view, svg).encode("utf-8", "backslashreplace"))
    return SurfaceFiles(page, data, pictures)


def as_json(view: SurfaceView) -> dict[str, Any]:
    """The surface as JSON values; a loss that is not finite is null."""
    path = {"path": [list(map(float, point)) for point in view.path], "steps": list(view.steps)} if len(view.path) else {}
    return {
        "name": view.name,
        "kind": view.title,
        **{name: json_value(value) for name, value in view.values.items()},
        "unit": view.unit,
        "x": view.x.tolist(),
        "y": view.y.tolist(),
        "loss": json_value(view.loss.tolist()),
        **path,
    }


def render(view: SurfaceView, svg: Markup | None) -> str:
    """Render the page as HTML. svg: the plot of the surface."""
    return template("surface.html").render(
        name=view.name,
        title=view.title,
        facts=view.facts,
        notes=_notes(view),
        panels=[Panel(svg, view.title, _caption(view)), *_slices(view)],
        path=_path_table(view),
    )


def _figure(view: SurfaceView) -> Figure | None:
    lowest, is_steep = _scale(view.loss)
    return contour_figure(
        view.x,
        view.y,
        view.loss,
        x_label=view.axes[0],
        y_label=view.axes[1],
        scale_label=f"loss, {view.unit}",
        path=[(float(across), float(up)) for across, up in view.path] or None,
        highest=HIGHEST * lowest if is_steep else None,
        log=is_steep,
    )


def _scale(loss: np.ndarray) -> tuple[float, bool]:
    """The lowest loss, and whether the scale is logarithmic."""
    finite = loss[np.isfinite(loss)]
    if not finite.size:
        return math.nan, False
    lowest = float(finite.min())
    return lowest, lowest > 0 and float(finite.max()) > STEEP * lowest


def _caption(view: SurfaceView) -> str:
    if len(view.path):
        return "The circle is the first point of the path, and the cross is the last."
    lowest, _ = _scale(view.loss)
    above = show_number(HIGHEST * lowest)
    return f"All losses above {above} have the same colour." if (view.loss > HIGHEST * lowest).any() else ""


def _notes(view: SurfaceView) -> list[str]:
    absent = int((~np.isfinite(view.loss)).sum())
    return [f"At {absent:,} of {view.loss.size:,} points the loss is not finite."] if absent else []


def _slices(view: SurfaceView) -> list[Panel]:
    """Plots of the slices through the centre of the surface; none for a trajectory."""
    if len(view.path):
        return []
    row, column = np.abs(view.y).argmin(), np.abs(view.x).argmin()
    svg = line_plot(
        "slices",
        [
            Series(view.axes[0], view.x.tolist(), view.loss[row].tolist()),
            Series(view.axes[1], view.y.tolist(), view.loss[:, column].tolist()),
        ],
        x_label="distance from the weights",
        y_label=f"loss, {view.unit}",
        description="The loss along each axis",
        log=_scale(view.loss)[1],
        whole=False,
    )
    return [Panel(svg, "Along each direction separately")]


def _path_table(view: SurfaceView) -> Table | None:
    if not len(view.path):
        return None
    rows = [
        [f"{step:,}", show_number(float(across)), show_number(float(up))]
        for step, (across, up) in zip(view.steps, view.path, strict=True)
    ]
    return Table(["step", "horizontal", "vertical"], rows)
