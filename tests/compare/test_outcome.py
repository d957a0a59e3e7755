"""What became of a run, on metrics that are written out."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kilolayer.compare.outcome import outcome_of
from kilolayer.evaluate.stack_label import checks_of
from kilolayer.report.record import Record

DONE = {"test": {}, "weights": {}}


def record(losses: list[float | None], valid: list[float | None] | None = None, **more: Any) -> Record:
    """A run with a row every ten steps."""
    train = [{"kind": "train", "step": 10 * index, "nll": loss} for index, loss in enumerate(losses, 1)]
    rows = [{"kind": "valid", "step": 10 * index, "loss": loss} for index, loss in enumerate(valid or [], 1)]
    settings: dict[str, Any] = {"config": {"train": {"steps": 10 * len(losses)}}, "scores": DONE}
    return Record(name="run", train=train, valid=rows, **settings | more)


def reference(loss: float) -> list[dict[str, Any]]:
    return [{"kind": "reference", "step": 0, "frequency_loss": loss}]


def skipped(*steps: int) -> list[dict[str, Any]]:
    return [{"kind": "event", "step": step, "text": f"step {step} skipped: the gradient is not finite"} for step in steps]


FALLING = [9.0, 7.5, 6.0, 5.0, 4.4, 4.0, 3.8, 3.7]


def test_a_run_that_learned_and_was_scored_is_finished() -> None:
    found = outcome_of(record(FALLING, [5.0, 3.6], reference=reference(6.2)))
    assert (found.kind, found.step, found.text, found.died) == ("finished", 80, "finished", False)


def test_a_run_without_scores_is_unfinished_and_tells_how_far_it_is() -> None:
    found = outcome_of(record(FALLING, scores={}, config={"train": {"steps": 2000}}))
    assert (found.kind, found.text) == ("unfinished", "step 80 of 2,000")


@pytest.mark.parametrize(
    ("losses", "kind"),
    [
        ([9.0, 7.0, 5.0, 4.0, 4.0, 6.5, 6.5, 6.4, 6.4, 6.4], "diverged"),  # as long as it has learned
        ([9.0, 7.0, 5.0, 4.0, 4.0, 4.0, 6.5, 6.5, 6.4, 6.4], "unfinished"),  # a spike may last so long
        ([9.0, 7.0, None, None, None, None], "diverged"),
        ([9.0, 7.0, 5.0, None, None], "unfinished"),
        ([None, None], "unfinished"),
        ([6.0, 6.0, 6.0, 6.0, 6.0, 6.0], "unfinished"),  # it may learn yet
    ],
)
def test_a_run_that_was_cut_has_diverged_where_that_has_lasted(losses: list[float | None], kind: str) -> None:
    wanted = {"train": {"steps": 2000}}
    found = outcome_of(record(losses, scores={}, config=wanted, reference=reference(6.0)))
    assert found.kind == kind
    assert outcome_of(record(losses, scores={}, config=wanted), "out of memory").kind == kind.replace("unfinished", "failed")


def stacks(*shares: float) -> list[dict[str, Any]]:
    """Checks of an encoder at every hundredth step, and of a decoder that is well."""
    return [
        {"kind": "stacks", "step": 100 * index, "encoder": {"reached": share}, "decoder": {"reached": 1.0}}
        for index, share in enumerate(shares, 1)
    ]


def test_a_stack_without_a_gradient_is_no_outcome_of_a_run_that_was_cut() -> None:
    assert outcome_of(record(FALLING, scores={}, stacks=stacks(1e-6, 1e-6))).kind == "unfinished"


def test_a_run_that_was_ended_because_a_stack_was_dying_is_dead() -> None:
    event = [{"kind": "event", "step": 2000, "ended_by": "encoder", "text": "..."}]
    found = outcome_of(record(FALLING, scores={}, event=event))
    assert (found.kind, found.step, found.text) == ("dead", 2000, "encoder dying, ended at step 2,000")
    resumed = [{**event[0], "step": 20}]  # it was resumed without train.stop_when_dead
    assert outcome_of(record(FALLING, scores={}, event=resumed)).kind == "unfinished"


def test_a_run_without_a_folder_waits() -> None:
    assert outcome_of(None).kind == "waiting"


def test_what_its_process_said_is_the_failure() -> None:
    assert outcome_of(None, "out of memory").text == "failed: out of memory"
    assert outcome_of(record(FALLING, scores={}), "out of memory").kind == "failed"


def test_a_finished_run_is_no_failure_whatever_was_said() -> None:
    assert outcome_of(record(FALLING), "the report cannot be written").kind == "finished"


def test_ten_skipped_steps_in_a_row_at_the_end_are_a_divergence_at_the_first_of_them() -> None:
    found = outcome_of(record(FALLING, scores={}, event=skipped(7, *range(83, 93))))
    assert (found.kind, found.text) == ("diverged", "diverged at step 83")


def test_a_resumed_run_that_diverges_again_has_diverged() -> None:
    assert outcome_of(record(FALLING, scores={}, event=skipped(*range(83, 90), *range(83, 93)))).step == 83


def test_skipped_steps_that_training_survived_are_none() -> None:
    assert outcome_of(record(FALLING, event=skipped(*range(31, 41)))).kind == "finished"


def test_a_loss_that_is_no_number_at_the_end_has_diverged_where_that_began() -> None:
    assert outcome_of(record([9.0, 7.0, 6.0, None, 5.5, None, None])).text == "diverged at step 60"
    assert outcome_of(record(FALLING, [5.0, None])).kind == "diverged"


def test_a_loss_that_rises_for_good_has_diverged_where_it_left() -> None:
    found = outcome_of(record([9.0, 7.0, 5.0, 4.0, 4.0, 4.0, 6.0, 6.5, 6.4, 6.4]))
    assert found.text == "diverged at step 70"


@pytest.mark.parametrize("start", [[6.2], [6.2, 6.0]])
def test_a_loss_that_explodes_in_the_first_steps_has_diverged_there(start: list[float]) -> None:
    found = outcome_of(record([*start, 1e7, 5e6, 7e6, 9e6, 6e6, 4e6, 3e6, 3e6], reference=reference(2.8)))
    assert (found.kind, found.step) == ("diverged", 10 * len(start) + 10)


def test_a_spike_that_training_recovers_from_is_none() -> None:
    assert outcome_of(record([9.0, 7.0, 5.0, 4.0, 7.5, 6.0, 4.2, 4.0, 3.9])).kind == "finished"


def test_one_bad_batch_at_the_end_is_none() -> None:
    assert outcome_of(record([*FALLING, 4.4])).kind == "finished"


def test_a_rise_of_less_than_half_a_nat_is_none() -> None:
    assert outcome_of(record([9.0, 7.0, 5.0, 4.0, 4.0, 4.0, 4.3, 4.4, 4.4, 4.4])).kind == "finished"


def test_a_loss_that_ends_above_its_start_has_diverged_though_it_never_fell_by_half_a_nat() -> None:
    assert outcome_of(record([5.0, 4.9, 4.8, 4.8, 4.8, 4.8, 5.2, 5.2, 5.2])).kind == "diverged"
    assert outcome_of(record([5.0, 5.01, 4.99, 5.0, 5.0, 5.0, 5.02, 5.01, 5.02])).kind == "finished"


def test_a_loss_that_rises_on_the_validation_part_alone_has_not_diverged() -> None:
    assert outcome_of(record(FALLING, [5.0, 4.0, 4.4, 5.2])).kind == "finished"


def test_without_a_curve_of_training_the_validations_tell() -> None:
    rising = [5.0, 4.0, 3.9, 6.0, 6.2, 6.1]
    assert outcome_of(record([5.0], rising)).text == "diverged at step 40"


def test_a_run_that_ends_at_the_loss_of_frequencies_has_made_no_progress() -> None:
    plateau = [9.0, 7.5, 6.3, 6.21, 6.2, 6.21]
    found = outcome_of(record(plateau, [6.25, 6.19], reference=reference(6.2)))
    assert (found.kind, found.text, found.died) == ("no_progress", "no progress", True)
    assert outcome_of(record(plateau, [6.25, 6.19])).kind == "finished"  # no reference, no verdict
    assert outcome_of(record(plateau, [6.25, 6.1], reference=reference(6.2))).kind == "finished"


def test_a_classifier_that_learned_its_examples_by_heart_has_made_progress() -> None:
    assert outcome_of(record([0.69, 0.6, 0.4, 0.1, 0.02], [0.7, 0.9, 1.2], reference=reference(0.69))).kind == "finished"


def test_a_stack_is_dead_by_the_end_of_its_run_alone() -> None:
    found = outcome_of(record(FALLING, stacks=stacks(*[0.5] * 15, *[1e-6] * 5)))
    assert (found.kind, found.text) == ("dead", "encoder dead")
    recovered = stacks(*[1e-6] * 15, *[0.5] * 5)
    said = [{"kind": "event", "step": 100, "fading": True, "text": "step 100: the gradient of the encoder's ..."}]
    assert outcome_of(record(FALLING, stacks=recovered, event=said)).kind == "finished"


@pytest.mark.parametrize("value", [math.inf, pytest.param(10**400, id="huge"), True, "5", [5], {}])
def test_checks_of_a_stranger_are_no_numbers(value: object) -> None:
    rows = [
        {"step": 1, "encoder": {"reached": value, "moved": value}},
        {"step": 2, "encoder": {"reached": 0.5, "moved": value}},
    ]
    (check,) = checks_of(rows)["encoder"]
    assert (check.step, check.reached, math.isnan(check.moved)) == (2, 0.5, True)


@pytest.mark.parametrize("value", [math.inf, 1e300, True, "5", [5], {}])
def test_rows_of_a_stranger_are_no_numbers(value: object) -> None:
    rows: list[Any] = [9.0, 7.0, 6.0, 5.5, value, value, value]
    assert outcome_of(record(rows, [value])).kind == "diverged"  # pyright: ignore[reportArgumentType]
