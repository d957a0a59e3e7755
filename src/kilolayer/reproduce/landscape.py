"""The roughness of a loss surface, and its plot."""

from __future__ import annotations

from typing import Any

import numpy as np

from kilolayer.probe.surface import Surface
from kilolayer.report.contour import contour_figure
from kilolayer.report.figure import to_svg
from kilolayer.report.panel import Panel

Stored = dict[str, Any]


def surface_as_json(surface: Surface, path: np.ndarray | None = None) -> Stored:
    """A surface as JSON values; numbers that are not finite become None."""
    loss = [[float(value) if np.isfinite(value) else None for value in row] for row in surface.loss]
    stored: Stored = {"x": surface.x.tolist(), "y": surface.y.tolist(), "loss": loss}
    return stored if path is None else stored | {"path": path.tolist()}


def roughness(stored: Stored) -> float:
    """The mean absolute second difference of the loss along x and y, relative to the height of the surface.

    It is 0 for a plane, small for a bowl, and large for a surface with many small hills. Values that are not finite count as
    the highest one.
    """
    loss = _filled(stored)
    height = float(loss.max() - loss.min())
    bends = [np.abs(np.diff(loss, n=2, axis=axis)).mean() for axis in (0, 1)]
    return float(np.mean(bends)) / height if height else 0.0


def picture(name: str, stored: Stored, title: str) -> Panel:
    """A contour plot of the surface, with the path of training if there is one."""
    loss = np.array([[np.nan if value is None else value for value in row] for row in stored["loss"]])
    path = [(x, y) for x, y in stored["path"]] if "path" in stored else None
    figure = contour_figure(
        stored["x"],
        stored["y"],
        loss,
        x_label="first direction",
        y_label="second direction",
        scale_label="loss, nats per token",
        path=path,
    )
    return Panel(None if figure is None else to_svg(figure, name, title), title, f"Roughness {roughness(stored):.4f}.")


def _filled(stored: Stored) -> np.ndarray:
    loss = np.array([[np.nan if value is None else value for value in row] for row in stored["loss"]])
    return np.nan_to_num(loss, nan=float(np.nanmax(loss)))
