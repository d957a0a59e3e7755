"""The law of depth, beside scipy and fits to fewer points."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kilolayer.errors import InputError
from kilolayer.evaluate.log_fit import fit_log

DEPTHS = [12, 20, 100, 200, 1000]
SCORES = [24.5, 25.7, 27.4, 28.1, 30.2]


def test_it_is_the_regression_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    expected = stats.linregress(np.log(DEPTHS), SCORES)
    found = fit_log(DEPTHS, SCORES)
    assert found.slope == pytest.approx(expected.slope)
    assert found.intercept == pytest.approx(expected.intercept)
    assert found.slope_error == pytest.approx(expected.stderr)
    assert found.r2 == pytest.approx(expected.rvalue**2)
    assert found.predict(48) == pytest.approx(expected.intercept + expected.slope * math.log(48))
    assert found.points == 5


def test_the_error_of_points_left_out_is_that_of_fits_without_them() -> None:
    missed = []
    for number in range(len(DEPTHS)):
        others = [index for index in range(len(DEPTHS)) if index != number]
        slope, intercept = np.polyfit(np.log([DEPTHS[index] for index in others]), [SCORES[index] for index in others], 1)
        missed.append(SCORES[number] - intercept - slope * math.log(DEPTHS[number]))
    assert fit_log(DEPTHS, SCORES).left_out_error == pytest.approx(math.sqrt(sum(each**2 for each in missed) / 5))


def test_points_on_a_law_are_fitted_exactly_and_scores_that_do_not_vary_have_no_share_explained() -> None:
    exact = fit_log([6, 18, 50], [1 + 2 * math.log(depth) for depth in (6, 18, 50)])
    assert (exact.intercept, exact.slope, exact.r2) == pytest.approx((1, 2, 1))
    assert exact.slope_error == pytest.approx(0, abs=1e-7)
    flat = fit_log([6, 18, 50], [3.0, 3.0, 3.0])
    assert flat.slope == 0
    assert math.isnan(flat.r2)
    assert str(fit_log([1, math.e], [5.0, 3.0])) == "5 - 2 log(depth), R^2 1.000"


def test_two_points_have_a_law_and_no_errors() -> None:
    found = fit_log([6, 18], [1.0, 2.0])
    assert found.predict(18) == pytest.approx(2.0)
    assert math.isnan(found.slope_error)
    assert math.isnan(found.left_out_error)
    # Without its only deep run, a law of two shallow ones is none.
    assert math.isnan(fit_log([6, 6, 18], [1.0, 1.2, 2.0]).left_out_error)


@pytest.mark.parametrize(
    ("depths", "scores", "match"),
    [([6, 6], [1, 2], "different"), ([], [], "different"), ([6, 18], [1], "2 depths"), ([6, 18], [1, math.nan], "finite")],
)
def test_what_has_no_law_is_refused(depths: list[float], scores: list[float], match: str) -> None:
    with pytest.raises(InputError, match=match):
        fit_log(depths, scores)
    with pytest.raises(InputError, match="positive"):
        fit_log([0, 6], [1, 2])
