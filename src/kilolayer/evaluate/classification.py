"""Metrics of predicted classes or numbers, by name, computed with scikit-learn and scipy.

All are percentages, as in GLUE's tables.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from kilolayer.errors import InputError, OptionError, unknown
from kilolayer.evaluate.scores import Score

PACKAGES = {"sklearn": "scikit-learn", "scipy": "scipy"}
Compute = Callable[[np.ndarray, np.ndarray, int], float]


@dataclass(frozen=True)
class LabelMetric:
    """A score of predictions against labels: class indices int [n], or numbers [n]."""

    key: str
    """Its name in configurations and in scores.json."""
    name: str
    package: str
    """The package that computes it."""
    detail: str
    """For the signature: details that the name leaves open."""
    compute: Compute
    """From predictions, labels and the number of classes to a score between 0 and 1."""

    def score(self, predictions: Sequence[float] | np.ndarray, labels: Sequence[float] | np.ndarray, classes: int) -> Score:
        """The score in percent. classes: their number; 0 if labels are numbers."""
        found, true = np.asarray(predictions), np.asarray(labels)
        if found.shape != true.shape or found.ndim != 1 or not len(found):
            raise InputError(
                f"{found.size} predictions for {true.size} labels", fix="give one label for each, and at least one"
            )
        require_packages()
        value = 100 * float(self.compute(found, true, classes))
        return Score(
            self.name, value, f"{self.detail}|n:{len(true)}|{PACKAGES[self.package]}:{version(PACKAGES[self.package])}"
        )


def require_packages() -> None:
    """Raise unless the packages that compute the metrics are installed."""
    missing = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise OptionError(
            f"metrics of classes and numbers need {' and '.join(missing)}",
            where="not installed here",
            fix="pip install 'kilolayer[understanding]'",
        )


def get_metric(key: str) -> LabelMetric:
    """The metric with this name."""
    if key not in METRICS:
        raise unknown(key, METRICS, kind="metric")
    return METRICS[key]


def _accuracy(found: np.ndarray, true: np.ndarray, classes: int) -> float:
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(true, found))


def _f1(found: np.ndarray, true: np.ndarray, classes: int) -> float:
    """With two classes, the F1 of the second; with more, the mean over classes."""
    from sklearn.metrics import f1_score

    of = {"pos_label": 1, "average": "binary"} if classes <= 2 else {"labels": list(range(classes)), "average": "macro"}
    options: dict[str, Any] = {**of, "zero_division": 0.0}
    return float(f1_score(true, found, **options))


def _matthews(found: np.ndarray, true: np.ndarray, classes: int) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(true, found))


def _pearson(found: np.ndarray, true: np.ndarray, classes: int) -> float:
    from scipy.stats import pearsonr

    return _correlation(pearsonr, found, true)


def _spearman(found: np.ndarray, true: np.ndarray, classes: int) -> float:
    from scipy.stats import spearmanr

    return _correlation(spearmanr, found, true)


def _correlation(measure: Callable[..., Any], found: np.ndarray, true: np.ndarray) -> float:
    """The correlation; 0 if one side is constant."""
    found, true = found.astype(np.float64), true.astype(np.float64)
    if len(true) < 2 or (found == found[0]).all() or (true == true[0]).all():
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about nearly constant input
        value = float(measure(true, found).statistic)
    return value if np.isfinite(value) else 0.0


METRICS = {
    metric.key: metric
    for metric in (
        LabelMetric("accuracy", "accuracy", "sklearn", "metric:accuracy", _accuracy),
        LabelMetric("f1", "F1", "sklearn", "metric:f1|of:second_class_or_mean", _f1),
        LabelMetric("matthews", "Matthews correlation", "sklearn", "metric:matthews", _matthews),
        LabelMetric("pearson", "Pearson correlation", "scipy", "metric:pearson", _pearson),
        LabelMetric("spearman", "Spearman correlation", "scipy", "metric:spearman", _spearman),
    )
}
