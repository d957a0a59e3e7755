"""Colour scales, dark for low values: linear or, for values over many powers of ten, logarithmic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, MaxNLocator

DECADES = 6  # powers of ten below the largest value that colours distinguish
ABSENT, BELOW = "#cccccc", "#000000"


@dataclass(frozen=True)
class ColourScale:
    """A scale from `low` to `high`, which are exponents of ten if `is_log`; missing values are grey, those below are black."""

    low: float
    high: float
    is_log: bool

    @classmethod
    def of(cls, images: Iterable[np.ndarray], *, log: bool) -> ColourScale | None:
        """A scale for all of the images; None if no value is finite, or with `log` none is positive."""
        values = np.concatenate([image[np.isfinite(image)] for image in images] or [np.empty(0)])
        values = np.log10(values[values > 0]) if log else values
        if not values.size:
            return None
        low, high = float(values.min()), float(values.max())
        if log:
            return cls(min(max(low, high - DECADES), high - math.log10(2)), high, is_log=True)
        return cls(low, max(high, low + 1e-6 * max(abs(low), 1.0)), is_log=False)

    @property
    def colours(self) -> Colormap:
        """From dark to light."""
        return mpl.colormaps["viridis"].with_extremes(bad=ABSENT, under=BELOW)

    def shades(self, image: np.ndarray) -> np.ndarray:
        """What to draw between `low` and `high`: NaN where there is no value, less than `low` where it has vanished."""
        if not self.is_log:
            return np.where(np.isfinite(image), image, math.nan)
        return np.log10(np.where(image > 0, image, np.where(np.isnan(image), math.nan, 10 ** (self.low - 1))))

    def draw(self, axes: Axes, image: np.ndarray, **options: Any) -> AxesImage:
        """The image in its colours."""
        axes.grid(visible=False)
        shown, cells = (
            {"cmap": self.colours, "vmin": self.low, "vmax": self.high},
            {"aspect": "auto", "interpolation": "nearest"},
        )
        return axes.imshow(self.shades(image), **shown, **cells, **options)

    def add_bar(self, figure: Figure, images: Sequence[AxesImage], axes: Sequence[Axes], label: str) -> None:
        """The legend of the colours beside `axes`, with plain numbers; an arrow shows that some values are below the scale."""
        below = any((np.ma.filled(np.ma.asarray(image.get_array()), math.nan) < self.low).any() for image in images)
        bar = figure.colorbar(images[-1], ax=list(axes), label=label, extend="min" if below else "neither")
        bar.locator = MaxNLocator(5, integer=self.is_log and self.high - self.low > 2)
        bar.formatter = FuncFormatter(lambda value, _: f"{10**value if self.is_log else value:.2g}")
        bar.update_ticks()
