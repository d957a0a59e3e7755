"""Plots as parts of a page: well-formed, unique ids, nothing lost in thinning, nothing drawn of nothing."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from kilolayer.report.plots import POINTS, Series, _thinned, bar_plot, line_plot


def lines(name: str, *series: Series, **options: bool) -> str:
    return line_plot(name, series, x_label="step", y_label="loss", description='loss "by" <step>', **options)


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


@pytest.mark.parametrize("y", [[], [math.nan, math.inf], [math.nan]])
def test_nothing_finite_is_no_plot(y: list[float]) -> None:
    assert lines("none", Series("a", range(len(y)), y)) == ""
    assert bar_plot("none", ["a"] * len(y), y, x_label="", y_label="", description="") == ""


@pytest.mark.parametrize("y", [[1e-9], [0.0, 1.0], [-1.0, 1.0], [2.0, 2.0], [1.0, math.nan, 1e30], [1e-3, 1e3]])
def test_a_logarithmic_axis_is_taken_only_where_it_can_be(y: list[float]) -> None:
    assert lines("log", Series("a", range(len(y)), y), log=True).startswith("<svg")


def test_thinning_keeps_ends_and_spikes() -> None:
    y = [1.0] * 10_000
    y[4_321], y[7_777], y[5_000] = 99.0, -99.0, math.nan
    x, kept = _thinned(Series("a", range(10_000), y))
    assert len(x) <= POINTS + 2
    assert (x[0], x[-1]) == (0, 9_999)
    assert {99.0, -99.0} <= set(kept)
    assert list(x) == sorted(x)


def test_bars_show_their_numbers_and_leave_gaps() -> None:
    svg = bar_plot("bars", ["0", "1-9", "10+"], [0.25, math.nan, 0.75], x_label="seen", y_label="F1", description="bars")
    texts = "".join(ElementTree.fromstring(svg).itertext())
    assert all(text in texts for text in ("0.25", "0.75", "1-9", "10+"))
    assert "nan" not in texts
