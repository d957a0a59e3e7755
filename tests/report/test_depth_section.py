"""What the page says about the gradient over depth."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from kilolayer.report.depth import depth_section
from kilolayer.report.page import render
from kilolayer.report.record import Record
from kilolayer.report.stacks_panel import troughs

WELL = [0.2, 0.5, 0.1, 0.3]


def checks(*shares: float, side: str = "encoder") -> list[dict[str, Any]]:
    return [{"kind": "stacks", "step": 10 * index, side: {"reached": share}} for index, share in enumerate(shares, 1)]


TROUGH = checks(0.05, 1e-3, 6e-4, 2.5e-4, 5e-4, 2e-3, 0.23, 0.46, 0.25, 0.54)


def test_a_trough_is_shown_as_such_and_is_no_warning() -> None:
    record = Record("run", config={"train": {"lr": 1e-3}}, train=[{"step": 100}], stacks=TROUGH, scores={"test": {}})
    (sentence,) = troughs(record)
    assert sentence == (
        "The encoder passed through a trough: at step 40 its first layers got 1/4,000 of the largest layer's gradient, and at "
        "step 70 again 0.23."
    )
    page = render(record)
    assert f"<li>{sentence}</li>".replace("'", "&#39;") in page
    assert "is dead" not in page
    assert "no steps were skipped" in page


def test_a_dead_stack_is_a_warning_once_the_run_has_ended() -> None:
    dead = checks(0.05, *[1e-6] * 20)
    ended = Record("run", config={"train": {"lr": 1e-3}}, train=[{"step": 210}], stacks=dead, scores={"test": {}})
    assert troughs(ended) == []
    page = render(ended)
    assert page.index("Warnings") < page.index("The encoder is dead: over the last tenth of the steps")
    assert "no steps were skipped" not in page
    assert "is dead" not in render(Record("run", config=ended.config, train=ended.train, stacks=dead))


@pytest.mark.parametrize("shares", [[0.5, 0.4, 0.3], [0.5, 2e-3, 0.5], [0.5, 1e-4, 5e-3]])
def test_what_did_not_fall_far_or_has_not_come_back_is_no_trough(shares: list[float]) -> None:
    assert troughs(Record("run", stacks=checks(*shares))) == []


def test_what_reaches_the_first_layers_is_the_first_plot() -> None:
    one = depth_section([Record("run", stacks=TROUGH + checks(0.5, 0.5, side="decoder"), layers=[norms(1)])])
    assert one.profiles[0].title == "Gradient that reaches the first layers"
    assert one.profiles[0].chart is not None
    assert [curve["name"] for curve in one.profiles[0].chart["curves"]] == ["encoder", "decoder"]
    two = depth_section([Record("a", stacks=TROUGH), Record("b", stacks=checks(0.5, 0.1)), Record("c")])
    assert two.profiles[0].chart is not None
    assert [curve["name"] for curve in two.profiles[0].chart["curves"]] == ["a", "b"]


def norms(step: int, layers: int = 4) -> dict[str, Any]:
    return {"step": step} | {kind: {"encoder": WELL, "decoder": [0.1] * layers} for kind in ("gradient", "update", "residual")}


def test_a_run_shows_every_norm_by_layer_and_step() -> None:
    found = depth_section([Record("run", layers=[norms(step) for step in (1, 10, 20)])])
    assert [panel.title for panel in found.pictures] == [
        "Gradient norm by layer and step",
        "Update norm by layer and step",
        "Residual stream RMS by layer and step",
    ]
    for panel in found.pictures:
        assert panel.svg is not None
        assert panel.svg.count("<image") == 2 + 1  # encoder, decoder, scale
        assert "encoder layer" in panel.svg
        assert "decoder layer" in panel.svg
    assert len(found.profiles) == 6


def test_the_largest_logits_are_shown_where_they_were_measured() -> None:
    logits = {"attention_logit": {"encoder": WELL, "decoder": WELL}, "cross_attention_logit": {"decoder": WELL}}
    found = depth_section([Record("run", layers=[{"step": step, **logits} for step in (1, 10)])])
    titles = ["Largest attention logit", "Largest cross-attention logit"]
    assert [panel.title for panel in found.pictures] == [f"{title} by layer and step" for title in titles]
    assert [panel.title for panel in found.profiles] == [
        "Largest attention logit, encoder",
        "Largest attention logit, decoder",
        "Largest cross-attention logit, decoder",
    ]


def test_a_language_model_has_one_stack() -> None:
    entries = [{"step": step, "gradient": {"decoder": WELL}} for step in (1, 10)]
    (panel,) = depth_section([Record("run", layers=entries)]).pictures
    assert panel.svg is not None
    assert "encoder layer" not in panel.svg


def test_a_single_measurement_is_shown_over_depth_alone() -> None:
    found = depth_section([Record("run", layers=[norms(1)])])
    assert (found.pictures, len(found.profiles)) == ([], 6)
    assert "By layer and step" not in render(Record("run", layers=[norms(1)]))
    assert "Norms by layer</h2>" not in render(Record("run"))


@pytest.mark.slow
def test_the_page_of_a_thousand_layers_a_side_stays_small() -> None:
    numbers = random.Random(0)
    entries = [
        {"step": step}
        | {
            kind: {side: [math.exp(numbers.gauss(0, 2)) for _ in range(1000)] for side in ("encoder", "decoder")}
            for kind in ("gradient", "update", "residual")
        }
        for step in range(1, 102)
    ]
    assert len(render(Record("run", layers=entries))) < 2_000_000
