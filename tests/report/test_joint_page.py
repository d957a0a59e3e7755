"""What the page's script is given, of one run and of several; samples with what differs in them."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from kilolayer.cli.main import main
from kilolayer.report.page import render
from kilolayer.report.record import Record
from kilolayer.report.samples_section import Piece, differing
from tests.fixtures.undrawn_charts import undrawn_charts
from tests.report.made_run import BRIEF, entries, make_run
from tests.report.parsed_page import Page

TRAIN = [{"kind": "train", "step": step, "loss": 9.0 / step, "lr": 1e-3, "grad_norm": 1.0} for step in range(10, 110, 10)]
VALID = [{"kind": "valid", "step": step, "loss": 8.0 / step, "bleu": 0.3 * step} for step in (50, 100)]
NORMS = {"gradient": {"encoder": [1.0, 2.0], "decoder": [3.0, 4.0, 5.0]}}


def charts_of(*records: Record, draws: bool = False) -> dict[str, dict[str, Any]]:
    """What the script is given, by chart. draws: whether the still pictures are drawn too."""
    with nullcontext() if draws else undrawn_charts():
        page = Page(render(*records))
    charts = json.loads(page.scripts[0])["charts"]
    assert [value for name, value in page.attributes if name == "data-chart"] == [chart["name"] for chart in charts]
    return {chart["name"]: chart for chart in charts}


def test_the_script_draws_every_number_of_the_run_on_one_range_of_steps() -> None:
    layers = [{"kind": "layers", "step": step, **NORMS} for step in (1, 120)]
    charts = charts_of(Record("run", train=TRAIN, valid=VALID, layers=layers))
    training, validation = charts["loss"]["curves"]
    assert training["x"] == [entry["step"] for entry in TRAIN]
    assert training["y"] == pytest.approx([entry["loss"] for entry in TRAIN], rel=1e-4)
    assert (validation["x"], validation["colour"] != training["colour"]) == ([50, 100], True)
    assert charts["loss"]["log"]
    by_step = [chart for chart in charts.values() if chart["x_label"] == "step"]
    assert [chart["ends"] for chart in by_step] == [[0, 120]] * 4  # loss, BLEU, gradient norm and learning rate
    by_layer = [chart for chart in charts.values() if chart["x_label"] == "layer"]
    assert [chart["ends"] for chart in by_layer] == [[1, 3]] * 2
    assert [curve["name"] for curve in charts["gradient-decoder"]["curves"]] == ["step 1", "step 120"]


def test_only_our_own_script_may_run_and_every_chart_has_a_still_picture() -> None:
    page = Page(render(Record("run", train=TRAIN, valid=VALID)))
    policy = next(value for name, value in page.attributes if name == "content" and "default-src" in value)
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert page.tags.count("svg") == len(json.loads(page.scripts[0])["charts"]) == 4
    asked = set(re.findall(r'find\("([^"]+)"\)', page.scripts[1]))
    assert asked == {"data"}


def test_a_run_that_diverged_ends_in_a_cross_and_gaps_are_kept() -> None:
    gone = [*TRAIN, {"kind": "train", "step": 110, "loss": math.nan}, {"kind": "train", "step": 120, "loss": math.inf}]
    (curve,) = charts_of(Record("run", train=gone), draws=True)["loss"]["curves"]
    assert curve["fatal"]
    assert curve["y"][-2:] == [None, None]
    assert not charts_of(Record("run", train=TRAIN))["loss"]["curves"][0]["fatal"]


def test_a_run_of_one_line_has_a_page() -> None:
    charts = charts_of(Record("run", train=TRAIN[:1], layers=[{"kind": "layers", "step": 1, **NORMS}]), draws=True)
    assert charts["loss"]["curves"][0]["x"] == [10]
    assert charts_of(Record("nothing yet")) == {}


def test_several_runs_lie_over_each_other_in_one_colour_each() -> None:
    layers = [{"kind": "layers", "step": step, **NORMS} for step in (1, 90)]
    runs = [Record("a", train=TRAIN, valid=VALID, layers=layers), Record("b", train=TRAIN[:5], layers=layers)]
    charts = charts_of(*runs)
    assert [curve["name"] for curve in charts["loss"]["curves"]] == ["a, training", "a, validation", "b, training"]
    colours = [curve["colour"] for curve in charts["loss"]["curves"]]
    assert (colours[0] == colours[1], colours[0] != colours[2]) == (True, True)
    assert charts["loss"]["curves"][1]["dash"]
    for name in ("gradient-norm", "rate", "gradient-encoder"):
        assert [(curve["name"], curve["colour"]) for curve in charts[name]["curves"]] == [("a", colours[0]), ("b", colours[2])]
    page = Page(render(*runs))
    assert page.headings == ["Warnings", "Training", "Norms by layer", "a", "b"]
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))


@pytest.mark.usefixtures("undrawn")
def test_the_command_writes_one_page_of_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(tmp_path / place / "run", BRIEF) for place in ("a", "b")]
    assert main(["report", *map(str, runs)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "run (1)" in page.headings
    assert "run (2)" in page.headings
    out = tmp_path / "mine.html"
    assert main(["report", str(runs[0]), "--out", str(out)]) == 0
    assert out.exists()
    assert not (runs[0] / "report.html").exists()
    assert main(["report", str(runs[0]), str(tmp_path)]) == 2


@pytest.mark.usefixtures("undrawn")
def test_the_loss_comes_before_the_norms_and_the_configuration_is_folded(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", entries()[:40])
    assert main(["report", str(run)]) == 0
    text = (run / "report.html").read_text(encoding="utf-8")
    headings = Page(text).headings
    assert headings.index("Training") < headings.index("Norms by layer") < headings.index("Scores")
    assert "<details><summary>config.toml</summary><pre>" in text


@pytest.mark.parametrize(
    ("task", "sample", "marked"),
    [
        ("translation", {"source": "x", "reference": "ein Hund", "hypothesis": "der Hund"}, ["ein", "der"]),
        ("masked_lm", {"masked": "a <mask>", "text": "a dog", "filled": "a cat"}, ["dog", "cat"]),
        ("classify", {"first": "fine", "label": "good", "prediction": "bad"}, ["good", "bad"]),
        ("causal_lm", {"prompt": "a", "text": "b", "continuation": "c"}, []),
        ("not_known", {"reference": "a", "hypothesis": "b"}, []),
    ],
)
def test_five_samples_are_open_and_their_differing_words_are_marked(
    task: str, sample: dict[str, str], marked: list[str]
) -> None:
    text = render(Record("run", config={"task": task}, samples=[sample] * 40))
    assert re.findall(r"<mark>(.*?)</mark>", text) == marked * 30
    assert text.partition("<details><summary>25 more</summary>")[0].count('<dl class="sample">') == 5
    assert text.count('<dl class="sample">') == 30
    assert "10 more in samples.json." in text


def test_words_are_shared_in_their_order() -> None:
    wanted, found = differing("the dog  sleeps in the garden", "a dog sleeps garden")
    assert wanted == [
        Piece("the", True),
        Piece(" dog  sleeps "),
        Piece("in", True),
        Piece(" "),
        Piece("the", True),
        Piece(" garden"),
    ]
    assert found == [Piece("a", True), Piece(" dog sleeps garden")]
    for text in ("", "  ", "one", "ein\nHund\u3000 läuft"):
        assert "".join(piece.text for piece in differing(text, "other words")[0]) == text
        assert not any(piece.differs for side in differing(text, text) for piece in side)
