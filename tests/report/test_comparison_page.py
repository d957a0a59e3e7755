"""The page of a comparison: self-contained, harmless whatever runs are called, and with every number that it is given."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kilolayer import report
from kilolayer.report.axis_colours import appearances
from kilolayer.report.comparison_data import BUDGET, FEWEST, axes_of, comparison_data, metrics_of, series_of_runs
from kilolayer.report.comparison_page import render_comparison, write_comparison_page
from kilolayer.report.comparison_view import ComparisonView, Grid, GridCell, NextStep, ViewAxis, ViewRun
from kilolayer.report.curves_plot import Curve, curves_plot, sensible_range
from kilolayer.report.facts import Fact
from kilolayer.report.figure import Series
from kilolayer.report.grid_plot import grid_plot
from tests.report.parsed_page import Page

HOSTILE = "</script></title></style></svg><script>alert(1)</script><!-- <img src=x onerror=f()>{{ 7 * 7 }}\"' \u2028 $\\frac{$"


def made_run(recipe: str, layers: int, *, points: int = 60, outcome: str = "finished", text: str = "finished") -> ViewRun:
    generator = random.Random(f"{recipe}{layers}")
    loss = [(step, 2 + 5 * math.exp(-step / 20) + generator.gauss(0, 0.1)) for step in range(1, points + 1)]
    valid = [(step, value + 0.2) for step, value in loss[::10]]
    norms = [(step, abs(generator.gauss(1, 0.2))) for step, _ in loss]
    options = {"model.recipe": recipe, "layers": layers, "train.lr": 1e-3}
    return ViewRun(
        f"{recipe}-{layers}", options, outcome, text, {"loss": loss, "valid": valid, "grad_norm": norms}, {"BLEU": 30.25}
    )


def made_view(**changed: Any) -> ComparisonView:
    recipes, depths = ["post_ln", "deepnorm"], [6, 18, 50]
    runs = [made_run(recipe, layers) for recipe in recipes for layers in depths]
    runs[2] = made_run("post_ln", 50, outcome="dead", text="encoder dead from step 100")
    runs[2] = replace(runs[2], report="runs/post_ln-50/report.html", advice="Lower the rate.")
    cells = [[GridCell(3.25, "3.25 ±0.01"), GridCell(3.0, "3.00"), GridCell(None, "encoder dead from step 100", "dead")]]
    cells += [[GridCell(3.125, "3.13"), None, GridCell(2.5, "2.50\n1 of 2 diverged")]]
    contents: dict[str, Any] = {
        "title": "Recipes by depth",
        "runs": runs,
        "axes": [ViewAxis("model.recipe", recipes), ViewAxis("layers", depths), ViewAxis("train.lr", [1e-3])],
        "grid": Grid("validation loss", "recipe", recipes, "layers", [str(depth) for depth in depths], cells),
        "table_note": "Mean and spread over two seeds.",
        "answers": ["Best: deepnorm 50L."],
        "facts": [Fact("Best", "deepnorm", "50 layers")],
        "command": "kilolayer compare runs/depths",
        "next_steps": [NextStep("Try a smaller rate.", "kilolayer compare runs/depths --set train.lr=1e-4")],
        "shared": ["train.steps = 60"],
        "notes": ["One run died."],
    }
    return ComparisonView(**(contents | changed))


def data_of(page: Page) -> dict[str, Any]:
    return json.loads(page.scripts[0])


def made_data(view: ComparisonView) -> dict[str, Any]:
    curves = series_of_runs(view.runs)
    return comparison_data(view, axes_of(view), metrics_of(curves), curves)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    write_comparison_page(folder / "comparison.html", made_view())
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page((folder / "comparison.html").read_text(encoding="utf-8"))


def test_the_page_needs_nothing_from_elsewhere(folder: Path, page: Page) -> None:
    text = (folder / "comparison.html").read_text(encoding="utf-8")
    assert not {"link", "img", "iframe", "object", "base"} & set(page.tags)
    references = [value for name, value in page.attributes if name in ("src", "href", "srcset", "action")]
    links = [value for value in references if not value.startswith(("#", "data:image/png;base64,"))]
    assert set(links) == {
        "runs/post_ln-50/report.html"
    }  # to the report of a run, beside what is wrong with it and in the table
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a language, in the script
    assert not re.search(r"\b(fetch|XMLHttpRequest|import|eval|innerHTML|outerHTML|document\.write)\b", page.scripts[1])
    assert sorted(path.name for path in folder.iterdir()) == ["comparison.html", "grid.svg"]


def test_only_our_own_script_may_run(page: Page) -> None:
    policy = next(value for name, value in page.attributes if name == "content" and "default-src" in value)
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert len(page.scripts) == 2


def test_the_page_tells_what_it_is_given(page: Page) -> None:
    for shown in (
        *("Recipes by depth", "6 runs", "Best", "deepnorm", "50 layers", "One run died.", "kilolayer compare runs/depths"),
        *("3.25 ±0.01", "Mean and spread over two seeds.", "encoder dead from step 100", "30.25", "best validation loss"),
        *("Best: deepnorm 50L.", "Lower the rate.", "Try a smaller rate.", "--set train.lr=1e-4", "train.steps = 60"),
    ):
        assert shown in page.text, shown
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_without_a_script_there_are_still_pictures_and_no_dead_controls(page: Page) -> None:
    labels = [value for name, value in page.attributes if name == "aria-label"]
    assert "training loss of 6 runs by step, coloured by recipe, dashed by layers" in labels
    assert "validation loss of 6 runs by step, coloured by recipe, dashed by layers" in labels
    assert ("id", "moving") in page.attributes
    assert page.attributes[page.attributes.index(("id", "moving")) + 1][0] == "hidden"


def test_the_script_finds_every_element_that_it_asks_for(page: Page) -> None:
    asked = set(re.findall(r'find\("([^"]+)"\)', page.scripts[1]))
    assert asked
    assert asked <= {value for name, value in page.attributes if name == "id"}


def test_every_point_of_every_curve_is_in_the_data(page: Page) -> None:
    view, data = made_view(), data_of(page)
    assert data["metrics"] == ["training loss", "validation loss", "gradient norm"]
    assert data["thinned"] is None
    for run, shown in zip(view.runs, data["runs"], strict=True):
        assert (shown["name"], shown["outcome"], shown["fatal"]) == (run.name, run.outcome_text, run.outcome == "dead")
        for key, (steps, values) in zip(("loss", "valid", "grad_norm"), shown["curves"], strict=True):
            assert steps == [step for step, _ in run.curves[key]]
            assert values == pytest.approx([value for _, value in run.curves[key]], rel=1e-4)


def test_runs_can_be_coloured_by_what_differs_between_them(page: Page) -> None:
    data = data_of(page)
    assert [axis["title"] for axis in data["axes"]] == ["recipe", "layers", "outcome", "run"]
    recipe, layers, outcome, run = data["axes"]
    places = [shown["values"] for shown in data["runs"]]
    assert [recipe["values"][place[0]]["label"] for place in places] == ["post_ln"] * 3 + ["deepnorm"] * 3
    assert [layers["values"][place[1]]["label"] for place in places] == ["6", "18", "50"] * 2
    assert outcome["values"][places[2][2]]["label"] == "dead"
    assert len({json.dumps(value) for value in run["values"]}) == len(places)


def test_axes_whose_names_end_alike_keep_their_whole_names() -> None:
    runs = [ViewRun(str(n), {"model.dropout": n, "train.dropout": -n}) for n in range(2)]
    view = ComparisonView("", runs, [ViewAxis("model.dropout", [0, 1]), ViewAxis("train.dropout", [0, -1])])
    assert [axis.title for axis in axes_of(view)] == ["model.dropout", "train.dropout", "run"]


def test_numbers_go_from_dark_to_light_and_names_never_look_alike() -> None:
    def brightness(colour: str) -> int:
        return sum(bytes.fromhex(colour[1:]))

    depths = appearances([50, 6, 200, 18])
    by_size = [depths[place] for place in (1, 3, 0, 2)]
    assert [brightness(each.colour) for each in by_size] == sorted(brightness(each.colour) for each in depths)
    names = appearances([f"recipe {n}" for n in range(40)])
    assert len({(each.colour, each.dash) for each in names}) == 40
    assert [each.label for each in appearances([True, 1, None, 4e-4])] == ["true", "1", "none", "0.0004"]


def test_true_and_one_are_two_values_but_one_and_one_point_zero_are_not() -> None:
    runs = [ViewRun(str(n), {"x": value}) for n, value in enumerate([True, 1, 1.0, False])]
    (axis, *_) = axes_of(ComparisonView("", runs, [ViewAxis("x", [True, 1])]))
    assert axis.indices == [0, 1, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("runs", [2, 60])
def test_many_long_curves_are_thinned_to_a_page_that_loads(runs: int) -> None:
    generator = np.random.default_rng(0)
    steps = range(1, 8_001)
    curves = {key: list(zip(steps, generator.normal(size=8_000).tolist(), strict=True)) for key in ("loss", "grad_norm")}
    curves["loss"][7_777] = (7_778, 1e6)
    data = made_data(ComparisonView("", [ViewRun(str(n), curves=curves) for n in range(runs)]))
    assert len(json.dumps(data)) < 5_000_000
    x, y, middles, means = data["runs"][-1]["curves"][0]
    assert FEWEST <= len(x) <= max(BUDGET // (2 * runs), FEWEST) + 2
    assert data["thinned"] >= len(x) - 2
    assert (7_778, 1e6) in zip(x, y, strict=True)
    assert (x[0], x[-1]) == (1, 8_000)
    # Smoothing works on means: with lowest and highest points alone a spike would weigh a hundred times too much.
    assert np.mean(means) == pytest.approx(np.mean([value for _, value in curves["loss"]]), rel=0.05)
    assert middles == sorted(middles)


def test_what_is_no_number_leaves_a_gap_and_no_curve_is_no_metric() -> None:
    broken = {"loss": [(3, math.inf), (1, 2.0), (2, math.nan), (math.nan, 1.0)], "valid": [(1, math.nan)], "empty": []}
    data = made_data(ComparisonView("", [ViewRun("a", curves=broken), ViewRun("b")]))
    assert data["metrics"] == ["training loss"]
    assert [run["curves"] for run in data["runs"]] == [[[[1, 2, 3], [2.0, None, None]]], [[[], []]]]


def test_hostile_text_in_every_field_stays_text() -> None:
    curves = {HOSTILE: [(1, 1.0), (2, 2.0)]}
    hostile = ViewRun(HOSTILE, {HOSTILE: HOSTILE}, HOSTILE, HOSTILE, curves, {HOSTILE: 1.0}, HOSTILE, HOSTILE)
    cells = [[GridCell(None, HOSTILE, "dead"), GridCell(1.0, HOSTILE)]]
    grid = Grid(HOSTILE, HOSTILE, [HOSTILE], HOSTILE, [HOSTILE, "b"], cells)
    view = ComparisonView(
        HOSTILE,
        [hostile, made_run(HOSTILE, 6)],
        [ViewAxis(HOSTILE, [HOSTILE, 1])],
        HOSTILE,
        [HOSTILE],
        [Fact(HOSTILE, HOSTILE, HOSTILE)],
        grid,
        [grid],
        HOSTILE,
        [HOSTILE],
        [NextStep(HOSTILE, HOSTILE)],
        [HOSTILE],
        HOSTILE,
    )
    text = render_comparison(view)
    shown = Page(text)
    assert text.count("</title>") == text.count("</style>") == 1
    assert text.count("<script") == text.count("</script>") == 2
    assert not {"img", "iframe", "object", "link"} & set(shown.tags)
    assert all(not name.startswith("on") for name, _ in shown.attributes)
    assert "{{ 7 * 7 }}" in shown.text
    data = data_of(shown)
    assert data["runs"][0]["name"] == data["runs"][0]["outcome"] == data["metrics"][0] == HOSTILE


def test_half_a_character_in_a_name_does_not_stop_the_page(tmp_path: Path) -> None:
    write_comparison_page(tmp_path / "page.html", ComparisonView("\ud800", [ViewRun("\udfff", curves={"loss": [(1, 1.0)]})]))
    assert "\\ud800" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_comparison_without_curves_or_runs_is_a_page_as_well(tmp_path: Path) -> None:
    write_comparison_page(tmp_path / "page.html", ComparisonView("waiting", [ViewRun("a", {}, "waiting", "waiting")]))
    waiting = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert waiting.headings == ["Runs"]
    assert Page(render_comparison(ComparisonView("nothing", []))).headings == ["Runs"]
    assert not (tmp_path / "grid.svg").exists()


def test_the_result_comes_first_then_what_went_wrong_and_what_to_do(page: Page) -> None:
    assert page.headings == [
        *("Result", "What went wrong", "What now", "Curves", "Runs", "Options that all runs share", "Command"),
    ]


def test_recipes_have_colours_and_depths_have_dashes(page: Page) -> None:
    data = data_of(page)
    assert (data["axes"][data["colour"]]["title"], data["axes"][data["line"]]["title"]) == ("recipe", "layers")
    dashes = [value["line"] for value in data["axes"][data["line"]]["values"]]
    assert dashes[-1] == []  # the deepest is solid
    assert len(set(map(tuple, dashes))) == 3
    recipes_alone = made_view(axes=[ViewAxis("model.recipe", ["post_ln", "deepnorm"])])
    assert made_data(recipes_alone)["line"] is None
    depths_alone = made_view(axes=[ViewAxis("layers", [6, 18, 50])])
    assert made_data(depths_alone)["line"] is None
    many = [f"recipe {n}" for n in range(30)]  # these need dashes themselves
    runs = [ViewRun(name, {"model.recipe": name, "layers": n % 3}) for n, name in enumerate(many)]
    axes = [ViewAxis("layers", [0, 1, 2]), ViewAxis("model.recipe", many)]
    found = made_data(ComparisonView("", runs, axes))
    assert (found["axes"][found["colour"]]["title"], found["line"]) == ("recipe", None)


def test_a_better_cell_has_more_colour_and_one_that_died_has_none() -> None:
    for larger, shares in ((True, ["0%", "50%", "100%"]), (False, ["100%", "50%", "0%"])):
        cells = [[GridCell(float(n), f"{n}.0") for n in (1, 2, 3)] + [GridCell(None, "diverged", "diverged"), None]]
        grid = Grid("score", "recipe", ["a"], "layers", list("12345"), cells, larger_is_better=larger)
        shown = Page(render_comparison(ComparisonView("", [], grid=grid)))
        assert [value for name, value in shown.attributes if name == "style"] == [f"--share: {share}" for share in shares]
        assert [value for name, value in shown.attributes if value == "fatal"] == ["fatal"]


def test_the_grid_hatches_what_died_and_says_how() -> None:
    grid = made_view().grid
    assert grid is not None
    root = ElementTree.fromstring(grid_plot("grid", grid) or "")
    texts = [" ".join("".join(element.itertext()).split()) for element in root.iter("text")]
    assert {"3.25 ±0.01", "encoder dead from", "step 100", "2.50", "1 of 2 diverged", "post_ln", "18"} <= set(texts)
    hatched = [element for element in root.iter("path") if "url(#" in element.attrib.get("style", "")]
    assert len(hatched) == 1


@pytest.mark.parametrize("larger_is_better", [True, False])
def test_the_better_a_cell_the_darker(larger_is_better: bool) -> None:
    cells = [[GridCell(value, f"{value}") for value in (1.0, 2.0, 3.0)]]
    svg = grid_plot("grid", Grid("score", "recipe", ["a"], "layers", ["1", "2", "3"], cells, larger_is_better))
    root = ElementTree.fromstring(svg or "")
    styles = [element.attrib.get("style", "") for element in root.iter("path")]
    fills = [found[1] for style in styles if "stroke: #b5b5b5" in style and (found := re.search(r"fill: #(\w{6})", style))]
    shade = [sum(bytes.fromhex(fill)) for fill in fills]
    assert len(shade) == 3
    assert shade == sorted(shade, reverse=larger_is_better)


def test_a_grid_of_nothing_is_no_picture_and_one_value_is_one() -> None:
    assert grid_plot("grid", Grid("loss", "a", ["1"], "b", ["1"], [[None]])) is None
    for cell in (GridCell(1.0, "1.0"), GridCell(None, "waiting", "waiting"), GridCell(math.nan, "no number", "dead")):
        assert grid_plot("grid", Grid("loss", "a", ["1"], "b", ["1"], [[cell]])) is not None


def test_the_grid_as_a_file_is_a_whole_picture(folder: Path) -> None:
    root = ElementTree.fromstring((folder / "grid.svg").read_text(encoding="utf-8"))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_a_few_wild_points_do_not_flatten_the_rest() -> None:
    calm = np.linspace(1.0, 5.0, 1000)
    assert sensible_range(calm) == (1.0, 5.0)
    low, high = sensible_range(np.concatenate([calm, [1e6] * 5]))
    assert low == 1.0
    assert 5.0 < high < 6.0
    assert sensible_range(np.array([2.0, 2.0])) == (2.0, 2.2)


def test_every_point_of_a_short_run_is_in_sight() -> None:
    for short in (np.array([9.0, 2.1, *np.linspace(2.0, 1.9, 28)]), np.array([1e3, 1e3, *np.linspace(2.0, 1.0, 190)])):
        assert sensible_range(short) == (short.min(), short.max())
    start = np.concatenate([np.full(9, 8.0), np.linspace(3.0, 2.0, 991)])  # a long run whose loss falls at once
    assert sensible_range(start) == (2.0, 8.0)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_chart_of_the_script_has_the_range_of_the_still_picture(tmp_path: Path) -> None:
    calm = np.linspace(1.0, 5.0, 1000)
    samples = [
        *(calm, np.concatenate([calm, [1e6] * 5]), np.concatenate([calm, [30.0] * 5])),
        *(
            np.array([9.0, 2.1, 2.0]),
            np.array([9.0, *np.linspace(2.0, 1.9, 198)]),
            np.array([9.0, *np.linspace(2.0, 1.9, 199)]),
        ),
    ]
    (tmp_path / "samples.json").write_text(json.dumps([list(each) for each in samples]))
    script = """
        const fs = require("fs"), vm = require("vm"), [plot, samples] = process.argv.slice(1);
        globalThis.window = { matchMedia: () => ({}) };
        vm.runInThisContext(fs.readFileSync(plot, "utf8"));
        const given = JSON.parse(fs.readFileSync(samples));
        console.log(JSON.stringify([false, true].map((every) => given.map((values) => sensibleRange(values, every)))));
    """
    plot = Path(report.__file__).parent / "templates/plot.js"
    words = ["node", "-e", script, str(plot), str(tmp_path / "samples.json")]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    cut, whole = json.loads(done.stdout)
    np.testing.assert_allclose(cut, [sensible_range(each) for each in samples], rtol=1e-12)
    np.testing.assert_allclose(whole, [(each.min(), each.max()) for each in samples], rtol=1e-12)
    assert [float(each.max()) == high for each, (_, high) in zip(samples, cut, strict=True)] == [
        True,
        False,
        True,
        True,
        True,
        False,
    ]


@pytest.mark.slow
def test_thirty_long_names_leave_room_for_the_curves_and_the_cells() -> None:
    names = [f"a recipe with a long name {n}" for n in range(30)]
    looks = appearances(names)
    curves = [Curve(Series(name, [1, 2], [1.0, n]), looks[n]) for n, name in enumerate(names)]
    svg = curves_plot(
        "many", curves, x_label="step", y_label="loss", description=""
    )  # a lack of room is a warning, and an error
    assert svg is not None
    cells = [[GridCell(float(n), f"{n}.000 ±0.012")] for n in range(30)]
    picture = grid_plot("grid", Grid("loss", "recipe", names, "layers", ["6"], cells))
    assert picture is not None
    wide = [
        element
        for element in ElementTree.fromstring(picture).iter("path")
        if "stroke: #b5b5b5" in element.attrib.get("style", "")
    ]
    edges = [float(x) for x in re.findall(r"[ML] ([-\d.]+) ", wide[0].attrib["d"])]
    assert max(edges) - min(edges) > 72  # points: the text of a cell has room
