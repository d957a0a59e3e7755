"""Bar plots as inline SVG: one bar per label, or several side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from markupsafe import Markup

from kilolayer.report.figure import LEGEND, PALETTE, STYLE, new_axes, shortened, to_svg

WIDTH = 0.7  # share of the space of a label
NUMBERED = 16  # up to this many bars, there is room for the number above each


def bar_plot(
    name: str, labels: Sequence[str], values: Sequence[float], *, x_label: str, y_label: str, description: str
) -> Markup | None:
    """A bar with its number for each label, as SVG; a gap where a value is not finite, None if no value is."""
    texts = {"x_label": x_label, "y_label": y_label, "description": description}
    return grouped_bar_plot(name, labels, {"": values}, **texts)


def grouped_bar_plot(
    name: str,
    labels: Sequence[str],
    groups: Mapping[str, Sequence[float]],
    *,
    x_label: str,
    y_label: str,
    description: str,
) -> Markup | None:
    """For each label, one bar per group side by side; groups: one value per label for each. None if no value is finite."""
    heights = {group: np.array(values, dtype=float) for group, values in groups.items()}
    if not any(np.isfinite(each).any() for each in heights.values()):
        return None
    count = len(labels) * len(heights)
    with mpl.rc_context(STYLE):
        figure, axes = new_axes(x_label, y_label)
        for index, (group, values) in enumerate(heights.items()):
            kept = np.flatnonzero(np.isfinite(values))
            centres = kept + WIDTH * ((index + 0.5) / len(heights) - 0.5)
            bars = axes.bar(
                centres,
                values[kept],
                width=WIDTH / len(heights),
                color=PALETTE[index % len(PALETTE)],
                label=shortened(group),
            )
            if count <= NUMBERED:
                axes.bar_label(bars, labels=[f"{height:.3g}" for height in values[kept]], fontsize=8, padding=1)
        shown = [shortened(label) for label in labels]
        axes.set_xticks(range(len(labels)), shown, rotation=30 if max(map(len, shown)) * len(shown) > 40 else 0)
        axes.set_xlim(-0.6, len(labels) - 0.4)
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.1)
        if len(heights) > 1:
            axes.legend(ncols=min(len(heights), 3), **LEGEND)
        return to_svg(figure, name, description)
