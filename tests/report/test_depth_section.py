"""What the page says about the gradient over depth."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from kilolayer.report.depth import depth_section, vanished_gradients
from kilolayer.report.page import render
from kilolayer.report.record import Record

WELL = [0.2, 0.5, 0.1, 0.3]


def entry(step: int, **gradient: Any) -> dict[str, Any]:
    return {"kind": "layers", "step": step, "gradient": gradient}


def test_gradients_of_one_size_are_well() -> None:
    assert vanished_gradients([]) == []
    assert (
        vanished_gradients([entry(1, encoder=WELL, decoder=WELL), entry(500, encoder=WELL, decoder=[1.0, 0.011, 0.5, 1.0])])
        == []
    )
    # What was lost and came back is well.
    assert vanished_gradients([entry(1, decoder=WELL), entry(2, decoder=[1e-9, 1.0]), entry(3, decoder=WELL)]) == []


def test_an_encoder_that_dies_in_training_is_named_with_its_cause() -> None:
    dying = [entry(1, encoder=WELL, decoder=WELL), entry(800, encoder=[4.1e-9, 2e-7, 0.004, 0.016], decoder=WELL)]
    where, unread, advice = vanished_gradients(dying)
    assert where == (
        "At step 800 the gradient does not reach 2 of the 4 layers of the encoder: "
        "its norm is 4.1e-09 in layer 1 and 1.6e-02 in layer 4."
    )
    assert "ignores the source" in unread
    assert (
        advice
        == "At step 1 it reached all layers: start again with a lower train.lr, more train.warmup_steps, or train.eps = 1e-4."
    )
    page = render(Record("run", train=[{"step": 800}], layers=[entry(800, encoder=[4.1e-9, 1.0], decoder=WELL)]))
    assert page.index("Warnings") < page.index("does not reach 1 of the 2 layers of the encoder")
    assert "no steps were skipped" not in page


def test_a_gradient_that_never_was_asks_for_another_recipe() -> None:
    found = vanished_gradients([entry(1, decoder=[1e-18, 1.0]), entry(500, decoder=[0.0, 1.0])])
    assert len(found) == 2
    assert "its norm is 0.0e+00 in layer 1 and" in found[0]
    assert found[1] == "It did not at step 1 either: choose a recipe for this depth, such as deepnorm."


@pytest.mark.parametrize("gradient", [None, {}, {"encoder": None}, {"encoder": [None, "a"]}, {"decoder": [0.0, 0.0]}, []])
def test_what_is_no_measurement_is_passed_over(gradient: Any) -> None:
    assert vanished_gradients([{"step": 3, "gradient": gradient}]) == []


def test_norms_that_are_no_numbers_do_not_count() -> None:
    assert vanished_gradients([entry(3, decoder=[1.0, math.nan, 0.5])]) == []
    assert (
        "1 of the 2 layers of the decoder: its norm is 1.0e-06 in layer 3 and"
        in vanished_gradients([entry(3, decoder=[math.nan, 1.0, 1e-6])])[0]
    )


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
