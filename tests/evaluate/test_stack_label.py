"""The label that a run gets at its end does not depend on what was seen on the way, and the rule on the way is as it says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kilolayer.evaluate.stack_label import (
    DEAD,
    LEVELS,
    Fading,
    StackCheck,
    as_fraction,
    checks_of,
    dead_stacks,
    first_layers,
    level_of,
)


def checks(*shares: float, moved: float = 0.3, every: int = 10) -> list[StackCheck]:
    return [StackCheck(every * index, share, moved) for index, share in enumerate(shares, 1)]


def sides(own: list[StackCheck], lr: float = 1e-3) -> list[str]:
    return [each.side for each in dead_stacks({"encoder": own}, lr)]


def test_a_trough_that_is_over_leaves_no_label() -> None:
    # DeepNorm 100L-100L at 1e-3 (benchmarks/reproduce/deepnet-table1.json), and one twice as deep
    assert sides(checks(5e-2, 1e-3, 6e-4, 2.5e-4, 5e-4, 2e-3, 0.23, 0.46, 0.25, 0.54)) == []
    assert sides(checks(5e-2, 1e-5, 1e-6, 1e-6, 1e-6, 1e-6, 1e-4, 1e-3, 1e-2, 0.5)) == []


def test_a_stack_that_dies_late_is_dead() -> None:
    assert sides(checks(*[0.6] * 18, 4e-8, 4e-8)) == ["encoder"]


def test_the_last_tenth_of_the_steps_counts_by_its_median() -> None:
    healthy, dead = [0.5] * 27, [1e-6] * 27
    assert sides(checks(*healthy, 1e-6, 0.5, 0.5)) == []
    assert sides(checks(*dead, 1e-6, 0.5, 1e-6)) == ["encoder"]
    assert sides(checks(0.5, 1e-6)) == ["encoder"]  # a short run has one check in its last tenth
    assert dead_stacks({"encoder": []}, 1e-3) == []


def test_the_limit_itself_is_not_dead() -> None:
    assert sides(checks(*[DEAD] * 10)) == []
    assert sides(checks(*[0.99 * DEAD] * 10)) == ["encoder"]


def test_eps_hides_a_gradient_that_moves_nothing_unless_the_rate_makes_up_for_it() -> None:
    (dead,) = dead_stacks({"decoder": checks(0.5, 0.5, moved=1e-4)}, 1e-3)
    assert (dead.side, dead.hidden) == ("decoder", True)
    assert "train.eps hides" in dead.text
    assert sides(checks(0.5, 0.5, moved=1e-4), lr=1.0) == []
    assert sides(checks(0.5, 0.5, moved=math.nan)) == []  # a rate of 0 moves nothing, whatever eps is


def test_rows_are_read_leniently() -> None:
    rows = [
        {"kind": "stacks", "step": 10, "encoder": {"reached": 0.5, "moved": None}, "decoder": {"reached": "much"}},
        {"kind": "stacks", "step": 20, "encoder": {"reached": 1, "moved": 0.2}, "decoder": 3},
    ]
    found = checks_of(rows)
    assert list(found) == ["encoder"]
    assert [(check.step, check.reached) for check in found["encoder"]] == [(10, 0.5), (20, 1.0)]
    assert math.isnan(found["encoder"][0].moved)


def test_a_check_is_written_in_few_digits_and_read_back() -> None:
    check = StackCheck(10, 0.123456, 0.3)
    (again,) = checks_of([{"step": 10, "encoder": check.row()}])["encoder"]
    assert (again.reached, again.moved) == (0.1235, 0.3)


def run_of(shares: list[float], steps: int) -> int | None:
    """The step at which a stack is found dying, with a check every ten steps."""
    fading = Fading()
    for check in checks(*shares):
        fading.add(check)
        if fading.is_dying(check.step, steps):
            return check.step
    return None


@pytest.mark.parametrize(
    ("shares", "steps", "found"),
    [
        ([0.5, *[4e-5] * 4], 100, 40),  # three checks are the least
        ([0.5, *[4e-5] * 8], 1000, 50),  # 3% of the steps since the first one below
        ([0.5, *[4e-5] * 3, 2e-4, *[4e-5] * 8], 1000, 90),  # one that is not begins anew
        ([0.5, *[8e-5] * 20], 1000, 120),  # 10% of the steps, if it is not so low
        ([0.5, *[8e-5] * 10, 2e-4, *[8e-5] * 20], 1000, 230),
        ([0.5, *[2e-4] * 50], 1000, None),
    ],
)
def test_a_stack_is_dying_once_it_has_had_no_gradient_for_long_enough(
    shares: list[float], steps: int, found: int | None
) -> None:
    assert run_of(shares, steps) == found


def test_each_level_is_said_once_and_the_lowest_of_several() -> None:
    fading = Fading()
    said = [fading.add(check) for check in checks(0.5, 5e-3, 5e-3, 5e-5, 0.5, 5e-4, 5e-5)]
    assert said == [None, LEVELS[0], None, LEVELS[2], None, None, None]


def test_levels_and_fractions_in_words() -> None:
    assert level_of(0.5) is None
    assert [level_of(share) for share in (9e-3, 9e-4, 9e-5)] == list(LEVELS)
    assert [as_fraction(share) for share in (0.5, 0.0033, 5.9e-4, 0.0)] == ["0.5", "1/300", "1/1,700", "none"]
    assert LEVELS[0].text.startswith(
        f"Of {LEVELS[0].seen} runs that were seen below 1/100, {LEVELS[0].recovered} recovered, and "
    )


def test_the_first_layers_are_a_tenth_and_at_least_one() -> None:
    assert first_layers([1.0, 3.0]) == 1.0
    assert first_layers([2.0, 4.0, *[9.0] * 18]) == 3.0


@pytest.mark.parametrize("name", ["fp32-seed1", "fp32-seed2", "eager-seed1"])
def test_the_trough_of_deepnorm_with_50_layers_per_side_is_no_verdict(name: str) -> None:
    """Runs on a GPU that end with BLEU 25 to 26, and were once ended at step 120."""
    path = Path(__file__).parents[2] / "benchmarks/dead/deepnorm.json"
    (run,) = [run for run in json.loads(path.read_text())["runs"] if run["name"] == name]
    fading = Fading()
    own = [StackCheck(step, reached, 1.0) for step, reached in run["stacks"]["encoder"]]
    said = [(level, check.step) for check in own if (level := fading.add(check)) is not None]
    assert [level for level, _ in said] == list(LEVELS[:2])
    assert said[-1][1] <= 120
    assert run_of([check.reached for check in own], 1000) is None
    assert dead_stacks({"encoder": own}, 1e-3) == []
    assert run["bleu"] > 24
