"""Averages over directions, by hand."""

from __future__ import annotations

import pytest

from kilolayer.data.parallel import Direction
from kilolayer.evaluate.scores import pivot_averages


def averages(**bleu: float) -> dict[str, dict[str, float]]:
    return pivot_averages({Direction.parse(name.replace("_", "-")): {"bleu": value} for name, value in bleu.items()})


def test_each_direction_counts_once_on_its_side() -> None:
    found = averages(en_de=10, en_fr=20, en_fi=60, de_en=30, fr_en=40)
    assert found == {"xx-en": {"bleu": pytest.approx(35)}, "en-xx": {"bleu": pytest.approx(30)}}


def test_one_side_alone_is_one_average() -> None:
    assert averages(de_en=30, fr_en=40) == {"xx-en": {"bleu": pytest.approx(35)}}


def test_without_a_single_shared_language_there_are_none() -> None:
    assert averages(en_de=1, de_en=2) == {}  # two languages are in both
    assert averages(en_de=1, de_fr=2, fr_en=3) == {}
    assert averages(en_de=1) == {}
    assert pivot_averages({}) == {}


def test_a_score_that_one_direction_lacks_is_not_averaged() -> None:
    scores = {Direction("en", "de"): {"bleu": 1.0, "meteor": 5.0}, Direction("en", "fr"): {"bleu": 3.0}}
    assert pivot_averages(scores) == {"en-xx": {"bleu": 2.0}}
