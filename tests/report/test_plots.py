"""Plots as parts of a page: well-formed, unique ids, nothing lost in thinning, nothing drawn of nothing."""

from __future__ import annotations

import base64
import io
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

import matplotlib.image
import numpy as np
import pytest

from kilolayer.report.bars import bar_plot
from kilolayer.report.figure import PALETTE, POINTS, Series, as_file, thinned
from kilolayer.report.layer_plots import layers_by_step_plot
from kilolayer.report.plots import heat_plot, line_plot


def lines(name: str, *series: Series, **options: bool) -> str:
    svg = line_plot(name, series, x_label="step", y_label="loss", description='loss "by" <step>', **options)
    assert svg is not None
    return svg


def test_a_plot_is_one_svg_element_that_scales() -> None:
    svg = lines("one", Series("training", [1, 2, 3], [3.0, 2.0, 1.0]), Series("validation", [1, 3], [3.5, 2.5]))
    root = ElementTree.fromstring(svg)
    assert root.tag == "svg"
    assert set(root.attrib) == {"viewBox", "role", "aria-label"}
    assert root.attrib["aria-label"] == 'loss "by" <step>'
    texts = "".join(root.itertext())
    assert all(word in texts for word in ("training", "validation", "step", "loss"))
    assert "http" not in svg


def test_two_plots_share_no_id_and_refer_to_their_own() -> None:
    series = Series("a", [1, 2], [1.0, 2.0])
    ids = [re.findall(r'\bid="([^"]+)"', lines(name, series)) for name in ("one", "two")]
    assert not set(ids[0]) & set(ids[1])
    for name, own in zip(("one", "two"), ids, strict=True):
        used = re.findall(r'(?:url\(|href=")#([^")]+)', lines(name, series))
        assert used
        assert set(used) <= set(own)
        assert len(own) == len(set(own))


def test_the_same_numbers_give_the_same_svg() -> None:
    assert lines("one", Series("a", [1, 2], [1.0, 2.0])) == lines("one", Series("a", [1, 2], [1.0, 2.0]))


def test_no_two_of_18_lines_look_alike() -> None:
    svg = lines("many", *(Series(f"line {index}", [1, 2], [index, index + 1.0]) for index in range(18)))
    styles = [path.get("style", "") for path in ElementTree.fromstring(svg).iter("path")]
    looks = {tuple(re.findall(r"(?:stroke|stroke-dasharray): [#\d][^;]*", style)) for style in styles if "fill: none" in style}
    looks = {look for look in looks if look and any(colour.lower() in look[-1] for colour in PALETTE)}
    assert len(looks) == 18


@pytest.mark.parametrize("y", [[], [math.nan, math.inf], [math.nan]])
def test_nothing_finite_is_no_plot(y: list[float]) -> None:
    assert line_plot("none", [Series("a", range(len(y)), y)], x_label="", y_label="", description="") is None
    assert bar_plot("none", ["a"] * len(y), y, x_label="", y_label="", description="") is None
    assert heat_plot("none", ["a"], [y], x_label="", scale_label="", description="") is None
    assert layers_by_step_plot("none", range(1), {"decoder": [y]}, scale_label="", description="") is None
    assert layers_by_step_plot("none", [], {}, scale_label="", description="") is None


@pytest.mark.parametrize("y", [[3.0, 2.0, 2.5, math.nan, math.nan], [2.0, 2.0, 2.0, 2.0, 2.0]])
def test_a_logarithmic_x_has_equal_steps_between_doublings_and_a_place_for_gaps(y: list[float]) -> None:
    root = ElementTree.fromstring(lines("doublings", Series("a", [0.25, 0.5, 1, 2, 4], y), log_x=True))
    ticks = [group for group in root.iter("g") if "xtick" in group.get("id", "")]
    assert ["".join(tick.itertext()).strip() for tick in ticks] == ["0.25", "0.5", "1", "2", "4"]
    places = [float(mark.get("x", "nan")) for tick in ticks for mark in tick.iter("use")]
    assert len(places) == 5
    assert np.diff(places) == pytest.approx((places[4] - places[0]) / 4, rel=1e-3)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("y", [[1e-9], [0.0, 1.0], [-1.0, 1.0], [2.0, 2.0], [1.0, math.nan, 1e30], [1e-3, 1e3]])
def test_a_logarithmic_axis_is_taken_only_where_it_can_be(y: list[float]) -> None:
    assert lines("log", Series("a", range(len(y)), y), log=True).startswith("<svg")


def test_thinning_keeps_ends_and_spikes() -> None:
    y = [1.0] * 10_000
    y[4_321], y[7_777], y[5_000] = 99.0, -99.0, math.nan
    x, kept = thinned(Series("a", range(10_000), y))
    assert len(x) <= POINTS + 2
    assert (x[0], x[-1]) == (0, 9_999)
    assert {99.0, -99.0} <= set(kept)
    assert list(x) == sorted(x)


def test_bars_show_their_numbers_and_leave_gaps() -> None:
    svg = bar_plot("bars", ["0", "1-9", "10+"], [0.25, math.nan, 0.75], x_label="seen", y_label="F1", description="bars")
    assert svg is not None
    texts = "".join(ElementTree.fromstring(svg).itertext())
    assert all(text in texts for text in ("0.25", "0.75", "1-9", "10+"))
    assert "nan" not in texts


def picture(steps: Sequence[float], **stacks: Sequence[Sequence[float]]) -> tuple[list[np.ndarray], dict[str, float]]:
    """The images of a plot as RGBA, the last one of its colour scale; and its texts with how far down each stands."""
    svg = layers_by_step_plot("picture", steps, stacks, scale_label="norm", description="norm by layer and step")
    assert svg is not None
    root = ElementTree.fromstring(svg)
    encoded = [element.attrib["href"].removeprefix("data:image/png;base64,") for element in root.iter("image")]
    images = [np.array(matplotlib.image.imread(io.BytesIO(base64.b64decode(each)))) for each in encoded]
    texts = [element for element in root.iter("text") if element.text]
    return images, {str(element.text): _height(element) for element in texts}


def _height(element: ElementTree.Element) -> float:
    if "y" in element.attrib:
        return float(element.attrib["y"])
    found = re.search(r"translate\(\S+ ([-.\d]+)\)|rotate\(-90 \S+ ([-.\d]+)\)", element.attrib["transform"])
    assert found is not None
    return float(found[1] or found[2])


def brightness(image: np.ndarray) -> np.ndarray:
    return image[..., :3].sum(axis=-1)


def test_a_picture_is_dark_where_a_layer_and_a_step_are_small() -> None:
    steps = [1, 10, 20, 30]
    rising = [[10.0 ** (layer + index - 5) for layer in range(3)] for index in range(4)]
    (image, _), texts = picture(steps, decoder=rising)
    shade = brightness(image)
    left_to_right = shade.mean(axis=0)
    assert left_to_right[0] < left_to_right[-1]
    assert abs(shade[0].mean() - shade[-1].mean()) > 0.1
    assert all(text in texts for text in ("1", "30", "step", "decoder layer", "norm"))


def test_stacks_share_one_scale_and_the_first_is_at_the_bottom() -> None:
    (top, bottom, _), texts = picture([1, 2], encoder=[[1e-4] * 3] * 2, decoder=[[1.0] * 5] * 2)
    darker, brighter = sorted((top, bottom), key=lambda image: float(brightness(image).mean()))
    assert brightness(darker).max() < brightness(brighter).min()
    assert texts["encoder layer"] > texts["decoder layer"]


@pytest.mark.slow
def test_vanished_values_are_black_and_absent_ones_grey() -> None:
    (image, _), _ = picture([1, 2], decoder=[[1.0, 0.0], [1.0, math.nan]])
    colours = {tuple(np.round(colour[:3] * 255).astype(int)) for colour in image.reshape(-1, image.shape[-1])}
    assert (0, 0, 0) in colours
    assert (0xCC, 0xCC, 0xCC) in colours
    rare, _ = picture([1, 2], decoder=[[1.0], [1e-30]])
    assert (brightness(rare[0]) == 0).any()


@pytest.mark.slow
def test_a_thousand_layers_and_many_steps_stay_small() -> None:
    values = np.exp(np.random.default_rng(0).normal(size=(3000, 1000))).tolist()
    svg = layers_by_step_plot("large", range(3000), {"encoder": values, "decoder": values}, scale_label="", description="")
    assert svg is not None
    assert len(svg) < 600_000


def test_layers_that_come_and_go_leave_gaps() -> None:
    assert picture([1, 2, 3], decoder=[[1.0], [], [1.0, 2.0, math.inf]])


def test_dollars_and_tags_in_labels_are_text() -> None:
    hostile = ["$\\frac{1}{$", "<script>1</script>", "a$b"]
    svg = bar_plot("bars", hostile, [1.0, 2.0, 3.0], x_label="$x$", y_label="]]>", description="<b>")
    assert svg is not None
    root = ElementTree.fromstring(svg)
    assert {*hostile, "$x$", "]]>"} <= set(root.itertext())
    assert not list(root.iter("script"))


def test_a_long_label_is_cut_and_the_plot_keeps_its_room() -> None:
    long = "$" * 500
    bars = bar_plot("bars", [long, "b"], [1.0, 2.0], x_label="", y_label="", description="")
    rows = heat_plot("rows", [long, "b"], [[1.0], [2.0]], x_label="", scale_label="", description="")
    for svg in (bars, rows, lines("lines", Series(long, [1], [1.0]), Series("b", [1], [1.0]))):
        assert svg is not None
        assert f"{'$' * 21}..." in ElementTree.fromstring(svg).itertext()


def test_background_text_and_grid_are_the_pages_and_in_a_file_plain_colours() -> None:
    svg = bar_plot("page", ["a", "b"], [1.0, 2.0], x_label="x", y_label="y", description="")
    assert svg is not None
    assert {"var(--paper, #ffffff)", "var(--ink, #1d1d1f)", "var(--line, #e3e3e3)"} <= set(re.findall(r"var\([^)]*\)", svg))
    alone = as_file(svg)
    assert "var(" not in alone
    assert "fill: #ffffff" in alone
