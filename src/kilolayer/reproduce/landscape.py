"""How rough a loss surface is, and its picture."""

from __future__ import annotations

from typing import Any

import numpy as np

from kilolayer.probe.surface import Surface
from kilolayer.report.contour import contour_plot
from kilolayer.report.panel import Panel

Stored = dict[str, Any]


def store(surface: Surface, path: np.ndarray | None = None) -> Stored:
    """A surface as JSON holds it; what is not finite is None."""
    loss = [[float(value) if np.isfinite(value) else None for value in row] for row in surface.loss]
    stored: Stored = {"x": surface.x.tolist(), "y": surface.y.tolist(), "loss": loss}
    return stored if path is None else stored | {"path": path.tolist()}


def roughness(stored: Stored) -> float:
    """The mean size of the second difference of the loss along x and along y, as a share of the surface's whole height.

    A plane has 0, a bowl little, a surface of many small hills much. What is not finite counts as the highest value.
    """
    loss = _filled(stored)
    height = float(loss.max() - loss.min())
    bends = [np.abs(np.diff(loss, n=2, axis=axis)).mean() for axis in (0, 1)]
    return float(np.mean(bends)) / height if height else 0.0


def picture(name: str, stored: Stored, title: str) -> Panel:
    """The surface as contours, with the path of the training where it has one."""
    loss = np.array([[np.nan if value is None else value for value in row] for row in stored["loss"]])
    path = [(x, y) for x, y in stored["path"]] if "path" in stored else None
    svg = contour_plot(
        name,
        stored["x"],
        stored["y"],
        loss,
        x_label="first direction",
        y_label="second direction",
        scale_label="loss, nats a token",
        description=title,
        path=path,
    )
    return Panel(svg, title, f"Roughness {roughness(stored):.4f}.")


def _filled(stored: Stored) -> np.ndarray:
    loss = np.array([[np.nan if value is None else value for value in row] for row in stored["loss"]])
    return np.nan_to_num(loss, nan=float(np.nanmax(loss)))
