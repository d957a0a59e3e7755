"""The files of a loss surface."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from kilolayer.report.facts import Fact
from kilolayer.report.surface_page import SurfaceView, write_surface

X = np.linspace(-1, 1, 5)


def view(loss: np.ndarray, **more: object) -> SurfaceView:
    options = {"facts": [Fact("Loss", "1.5", "nats")], "values": {"centre": 1.5, "standard_error": math.nan}, **more}
    return SurfaceView("<b>run</b>", "Loss surface", X, X, loss, "nats per token", ("first", "second"), **options)  # type: ignore[arg-type]


def bowl() -> np.ndarray:
    return 1 + X[:, None] ** 2 + X**2


def test_page_pictures_and_numbers_are_written(tmp_path: Path) -> None:
    files = write_surface(tmp_path / "new", "surface", view(bowl()))
    assert {path.name for path in (tmp_path / "new").iterdir()} == {f"surface.{end}" for end in ("html", "json", "svg", "png")}
    assert [path.suffix for path in files.pictures] == [".svg", ".png"]
    assert ElementTree.parse(files.pictures[0]).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert files.pictures[1].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    page = files.page.read_text()
    assert page.count("<svg ") == 2
    assert "<b>run" not in page
    assert "&lt;b&gt;run" in page
    found = json.loads(files.data.read_text())
    assert np.array_equal(np.array(found["loss"]), bowl())
    assert found["x"] == found["y"] == X.tolist()
    assert found["centre"] == 1.5
    assert found["standard_error"] is None
    assert "path" not in found


@pytest.mark.slow
def test_the_same_surface_gives_the_same_files(tmp_path: Path) -> None:
    first, second = (write_surface(tmp_path / name, "surface", view(bowl())) for name in "ab")
    for one, other in zip((first.page, first.data, *first.pictures), (second.page, second.data, *second.pictures), strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_a_path_is_drawn_and_listed(tmp_path: Path) -> None:
    files = write_surface(tmp_path, "trajectory", view(bowl(), path=[(-0.5, 0.25), (0.0, 0.0)], steps=[10, 2000]))
    page = files.page.read_text()
    assert page.count("<svg ") == 1
    assert "2,000" in page
    assert "-0.5" in page
    found = json.loads(files.data.read_text())
    assert found["path"] == [[-0.5, 0.25], [0.0, 0.0]]
    assert found["steps"] == [10, 2000]


@pytest.mark.slow
@pytest.mark.parametrize("far", [math.inf, math.nan, 1e30])
def test_what_diverges_does_not_hide_the_rest(tmp_path: Path, far: float) -> None:
    loss = bowl()
    loss[0] = far
    files = write_surface(tmp_path, "surface", view(loss))
    page, found = files.page.read_text(), json.loads(files.data.read_text())
    assert len(files.pictures) == 2
    assert found["loss"][0][0] == (1e30 if far == 1e30 else None)
    assert ("At 5 of 25 points the loss is not finite." in page) == (far != 1e30)
    assert ("All losses above 100 have the same colour." in page) == (not math.isnan(far))


def test_without_a_finite_loss_there_is_no_picture(tmp_path: Path) -> None:
    files = write_surface(tmp_path, "surface", view(np.full((5, 5), math.nan)))
    assert files.pictures == []
    assert "At 25 of 25 points" in files.page.read_text()
