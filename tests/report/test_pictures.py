"""The pictures that pages share: contours with a path, fits, bars, layers by kind."""

from __future__ import annotations

import base64
import io
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from markupsafe import Markup

from kilolayer.report.bars import bar_plot, grouped_bar_plot
from kilolayer.report.contour import contour_figure
from kilolayer.report.figure import Series, as_file, to_svg
from kilolayer.report.fit import Measured, fit_plot
from kilolayer.report.layer_plots import layers_by_kind_plot

TEXTS: dict[str, Any] = {"x_label": "across", "y_label": "up", "description": "a <picture>"}
SCALED: dict[str, Any] = {"scale_label": "height", "description": "a <picture>"}
PLANE = np.linspace(-1.0, 1.0, 9)


def root_of(svg: Markup | None) -> ElementTree.Element:
    assert svg is not None
    return ElementTree.fromstring(svg)


def texts_of(svg: Markup | None) -> list[str]:
    return [text for element in root_of(svg).iter("text") if (text := "".join(element.itertext()).strip())]


def contour_plot(name: str, *values: Any, description: str, **options: Any) -> Markup | None:
    figure = contour_figure(*values, **options)
    return None if figure is None else to_svg(figure, name, description)


def bowl() -> np.ndarray:
    x, y = np.meshgrid(PLANE, PLANE)
    return 1.0 + x**2 + 3 * y**2


def group(svg: Markup | None, prefix: str) -> list[ElementTree.Element]:
    """The elements whose id, behind the picture's name, begins so."""
    return [element for element in root_of(svg).iter() if re.match(rf"[^-]+-{prefix}", element.attrib.get("id", ""))]


def test_a_contour_has_a_scale_from_its_lowest_value() -> None:
    svg = contour_plot("bowl", PLANE, PLANE, bowl(), x_label="across", y_label="up", **SCALED)
    texts = texts_of(svg)
    assert {"across", "up", "height", "1"} <= set(texts)
    assert root_of(svg).attrib["aria-label"] == "a <picture>"


def test_a_path_is_drawn_through_its_points_in_order() -> None:
    plain = contour_plot("bowl", PLANE, PLANE, bowl(), x_label="", y_label="", **SCALED)
    path = [(-0.5, -0.5), (0.0, 0.5), (0.5, 0.0)]
    svg = contour_plot("bowl", PLANE, PLANE, bowl(), path=path, x_label="", y_label="", **SCALED)
    known = {element.attrib.get("d") for element in root_of(plain).iter("path")}
    lines = [element.attrib["d"] for element in root_of(svg).iter("path") if element.attrib.get("d") not in known]
    drawn = [re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", line) for line in lines]
    (across, up) = zip(*[(float(x), float(y)) for x, y in next(points for points in drawn if len(points) == 3)], strict=True)
    assert across[1] - across[0] == pytest.approx(across[2] - across[1], abs=1e-3)  # equal steps to the right
    assert up[0] - up[1] == pytest.approx(2 * (up[2] - up[1]), abs=1e-3)  # of SVG's y, which points down


def test_what_lies_above_the_highest_is_told_from_what_is_not_known() -> None:
    heights = bowl()
    heights[0, 0], heights[8, 8] = math.inf, math.nan
    clipped = contour_plot("bowl", PLANE, PLANE, heights, highest=2.0, x_label="", y_label="", **SCALED)
    numbers = [float(text) for text in texts_of(clipped) if re.fullmatch(r"[\d.]+", text)]
    assert max(numbers) <= 2.0
    for log in (True, False):
        assert contour_plot("bowl", PLANE, PLANE, heights, log=log, x_label="", y_label="", **SCALED)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("heights", [np.zeros((3, 3)), np.full((3, 3), -2.5), np.full((3, 3), 1e-30), -np.eye(3)])
def test_flat_and_negative_surfaces_are_drawn_under_either_scale(heights: np.ndarray) -> None:
    for log in (True, False):
        assert contour_plot("flat", range(3), range(3), heights, log=log, x_label="", y_label="", **SCALED)


def test_a_fit_has_the_colour_of_its_points_and_ticks_at_their_depths() -> None:
    depths = [6, 18, 50, 100]
    points = [Measured("deep", depths, [1.0, 2.0, 3.0, 4.0], [0.1, math.nan, 0.1, 0.1]), Measured("flat", depths, [1.0] * 4)]
    svg = fit_plot("fit", points, [Series("deep", depths, [1.1, 2.1, 2.9, 4.0]), Series("paper", depths, [3.0] * 4)], **TEXTS)
    texts = texts_of(svg)
    assert {"6", "18", "50", "100", "deep", "flat", "paper"} <= set(texts)
    assert texts.count("deep") == 1
    dashed = [style for element in root_of(svg).iter("path") if "dasharray" in (style := element.attrib.get("style", ""))]
    assert any("#0072b2" in style for style in dashed)


def test_a_logarithmic_axis_spaces_equal_ratios_equally() -> None:
    svg = fit_plot("fit", [Measured("deep", [10, 100, 1000], [1.0, 2.0, 3.0])], **TEXTS)
    places = {
        t.text: float(t.attrib["x"]) for t in root_of(svg).iter("text") if t.text in ("10", "100", "1,000") and "x" in t.attrib
    }
    assert places["100"] - places["10"] == pytest.approx(places["1,000"] - places["100"], abs=0.01)


def _extent(element: ElementTree.Element) -> tuple[float, float]:
    """Lowest and highest y of the lines in it."""
    lines = " ".join(path.attrib.get("d", "") for path in element.iter("path"))
    heights = [float(y) for _, y in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", lines)]
    return min(heights), max(heights)


def test_groups_of_bars_stand_side_by_side_and_in_the_legend() -> None:
    groups = {"paper": [1.0, math.nan], "here": [2.0, 3.5]}
    texts = texts_of(grouped_bar_plot("bars", ["6L", "18L"], groups, **TEXTS))
    assert {"paper", "here", "6L", "18L", "1", "2", "3.5"} <= set(texts)
    assert "nan" not in texts


def test_layers_by_kind_are_rows_of_cells_from_dark_to_light() -> None:
    stacks = {"encoder": {"attention": [1e-3, 1e-2], "FFN": [1e-1, 1.0]}, "decoder": {"FFN": [0.0, math.nan]}}
    svg = layers_by_kind_plot("kinds", stacks, **SCALED)
    assert {"attention", "FFN", "encoder layer", "decoder layer", "height"} <= set(texts_of(svg))
    decoder, encoder, _ = (_pixels(element) for element in root_of(svg).iter("image"))  # from the top down
    shade = encoder[..., :3].sum(axis=-1)
    top, bottom = shade[: len(shade) // 2], shade[len(shade) // 2 :]
    halves = [half[:, columns].mean() for half in (top, bottom) for columns in (slice(0, 5), slice(-5, None))]
    assert halves == sorted(halves)
    seen = {tuple(np.round(colour * 255).astype(int)) for colour in decoder[..., :3].reshape(-1, 3)}
    assert {(0, 0, 0), (0xCC, 0xCC, 0xCC)} <= seen


def _pixels(image: ElementTree.Element) -> np.ndarray:
    """[height, width, 4], the top row first, as it is seen."""
    encoded = image.attrib["href"].removeprefix("data:image/png;base64,")
    pixels = np.array(matplotlib.image.imread(io.BytesIO(base64.b64decode(encoded))))
    return pixels[::-1] if "scale(1 -1)" in image.attrib["transform"] else pixels


@pytest.mark.parametrize(
    "draw",
    [
        lambda y: contour_plot("none", [0, 1], [0, 1], [y, y], x_label="", y_label="", **SCALED),
        lambda y: fit_plot("none", [Measured("a", range(len(y)), y)], **TEXTS),
        lambda y: bar_plot("none", ["a"] * len(y), y, **TEXTS),
        lambda y: layers_by_kind_plot("none", {"decoder": {"FFN": y}}, **SCALED),
        lambda y: layers_by_kind_plot("none", {"decoder": {"FFN": y}}, log=False, **SCALED),
    ],
)
def test_nothing_finite_is_no_picture(draw: Callable[[list[float]], Markup | None]) -> None:
    assert draw([math.nan, math.nan]) is None


def test_a_picture_as_a_file_names_its_language() -> None:
    svg = bar_plot("bars", ["<a>"], [1.0], **TEXTS)
    assert svg is not None
    root = ElementTree.fromstring(as_file(svg))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "<a>" in "".join(root.itertext())
