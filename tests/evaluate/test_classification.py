"""Metrics of classes and numbers, against numbers worked out by hand."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from kilolayer.errors import InputError, OptionError, UnknownOptionError
from kilolayer.evaluate.classification import METRICS, get_metric

LABELS = [0, 0, 0, 1, 1, 1, 1, 0]
FOUND = [0, 1, 0, 1, 1, 0, 1, 0]
# true positives 3, false positives 1, false negatives 1, true negatives 3


def value(key: str, found: list[Any], labels: list[Any], classes: int = 2) -> float:
    return get_metric(key).score(found, labels, classes).value


def test_accuracy_counts_what_is_right() -> None:
    assert value("accuracy", FOUND, LABELS) == pytest.approx(100 * 6 / 8)


def test_f1_is_of_the_second_class() -> None:
    # precision 3/4, recall 3/4
    assert value("f1", FOUND, LABELS) == pytest.approx(75.0)
    # now precision 3/3 and recall 3/4: 2 * 1 * 0.75 / 1.75
    assert value("f1", [0, 0, 0, 1, 1, 0, 1, 0], LABELS) == pytest.approx(100 * 1.5 / 1.75)
    assert value("f1", [0] * 8, LABELS) == 0.0


def test_f1_of_three_classes_is_the_mean_over_them() -> None:
    # class 0: precision 1, recall 1/2; class 1: precision 1/3, recall 1; class 2: nothing is right
    assert value("f1", [0, 1, 1, 1], [0, 0, 1, 2], 3) == pytest.approx(100 * (2 / 3 + 1 / 2 + 0) / 3)


def test_matthews_is_the_correlation_of_the_two_tables() -> None:
    # (3*3 - 1*1) / sqrt(4*4*4*4)
    assert value("matthews", FOUND, LABELS) == pytest.approx(100 * 8 / 16)
    assert value("matthews", [1] * 8, LABELS) == 0.0


def test_pearson_and_spearman() -> None:
    labels, found = [1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 10.0]
    # means 2.5 and 4; sums of products: (-1.5)(-3) + (-.5)(-1) + (.5)(-2) + (1.5)(6) = 13; squares: 5 and 50
    assert value("pearson", found, labels, 0) == pytest.approx(100 * 13 / (5 * 50) ** 0.5)
    # ranks 1 3 2 4: 1 - 6 * (1 + 1) / (4 * 15)
    assert value("spearman", found, labels, 0) == pytest.approx(100 * 0.8)


@pytest.mark.parametrize("key", ["pearson", "spearman"])
def test_a_constant_prediction_goes_with_nothing(key: str) -> None:
    assert value(key, [2.0, 2.0, 2.0], [1.0, 2.0, 3.0], 0) == 0.0
    assert value(key, [1.0, 2.0, 3.0], [2.0, 2.0, 2.0], 0) == 0.0
    assert value(key, [1.0], [2.0], 0) == 0.0


@pytest.mark.parametrize("key", sorted(METRICS))
def test_a_score_says_how_it_was_computed(key: str) -> None:
    score = get_metric(key).score([0, 1, 1], [0, 1, 0], 2)
    assert f"metric:{key}" in score.signature
    assert "|n:3|" in score.signature
    assert score.signature.rpartition(":")[2][0].isdigit()


def test_an_unknown_metric_meets_the_nearest() -> None:
    with pytest.raises(UnknownOptionError, match="did you mean 'matthews'"):
        get_metric("mathews")


def test_predictions_need_as_many_labels() -> None:
    with pytest.raises(InputError, match="2 predictions for 3 labels"):
        get_metric("accuracy").score([0, 1], [0, 1, 1], 2)
    with pytest.raises(InputError, match="at least one"):
        get_metric("accuracy").score([], [], 2)


def test_without_the_packages_the_error_tells_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"pip install 'kilolayer\[understanding\]'"):
        get_metric("accuracy").score([0, 1], [0, 1], 2)
