"""Significance of score differences by paired bootstrap resampling of the test set (Koehn 2004)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kilolayer.errors import OptionError, shown
from kilolayer.evaluate.scores import Bleu, Lines, Metric, Numbers

Verdict = Literal["+", "-", "="]

SAMPLES = 1000  # as in the very-deep paper (Liu et al. 2020, section 4)
MOST_SAMPLES = 100_000
SEED = 12345  # sacreBLEU's, so that its p-values are reproduced
LEVEL = 0.05


@dataclass(frozen=True)
class Estimate:
    """A value on the test set, and the interval that contains it in 95% of the resampled test sets."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """A system compared with a baseline on the same sentences.

    p_value: sacreBLEU's, how often a resampled difference exceeds its mean by more than the observed difference. At a level of
    0.05, a system is wrongly called better or worse once in twenty times, in each direction.
    wins: the fraction of resampled test sets on which the system is better.
    """

    metric: str
    signature: str
    baseline: Estimate
    system: Estimate
    difference: Estimate
    p_value: float
    wins: float
    verdict: Verdict
    samples: int
    seed: int

    def __str__(self) -> str:
        change, words = self.difference, {"+": "better", "-": "worse", "=": "not significantly different"}
        return (
            f"{self.metric} {self.system.value:.2f} against {self.baseline.value:.2f}: {change.value:+.2f} "
            f"[{change.low:+.2f}, {change.high:+.2f}], p = {self.p_value:.3f}, {words[self.verdict]}"
        )


@dataclass(frozen=True)
class Matrix:
    """Table 3 of the very-deep paper: entry (i, j) says whether system i is better (+) or worse (-) than j, or neither (=)."""

    metric: str
    signature: str
    names: tuple[str, ...]
    scores: tuple[Estimate, ...]
    p_values: tuple[tuple[float, ...], ...]
    verdicts: tuple[tuple[Verdict | Literal[""], ...], ...]

    def rows(self) -> list[list[str]]:
        """Header and rows in the paper's format: systems are lettered, and the diagonal is empty."""
        letters = [_letter(index) for index in range(len(self.names))]
        header = ["system", self.metric, *letters]
        labels = [f"{letter}:{name}" for letter, name in zip(letters, self.names, strict=True)]
        return [header] + [
            [label, f"{score.value:.1f}", *verdicts]
            for label, score, verdicts in zip(labels, self.scores, self.verdicts, strict=True)
        ]


def resampled_sums(statistics: Numbers, samples: int = SAMPLES, seed: int = SEED) -> Numbers:
    """[samples, terms]: sums of [sentences, terms] over resampled test sets of the same size, drawn with replacement."""
    generator = np.random.default_rng(seed)
    sentences = len(statistics)
    draws = (generator.integers(sentences, size=sentences) for _ in range(samples))
    return np.stack([np.bincount(drawn, minlength=sentences) @ statistics for drawn in draws])


def paired_bootstrap(
    baseline: Lines,
    system: Lines,
    references: Lines,
    metric: Metric | None = None,
    *,
    samples: int = SAMPLES,
    seed: int = SEED,
) -> Comparison:
    """The system's score against the baseline's, with the p-value of the difference."""
    metric = metric or Bleu()
    values, resampled = _resample([baseline, system], references, metric, samples, seed)
    p_value = _p_value(values[0], values[1], resampled[0], resampled[1])
    gain = (resampled[1] - resampled[0]) * (1 if metric.larger_is_better else -1)
    return Comparison(
        metric=metric.name,
        signature=_sign(metric, samples, seed),
        baseline=_estimate(values[0], resampled[0]),
        system=_estimate(values[1], resampled[1]),
        difference=_estimate(values[1] - values[0], resampled[1] - resampled[0]),
        p_value=p_value,
        wins=float((gain > 0).mean()),
        verdict=_verdict(values[1], values[0], p_value, metric),
        samples=samples,
        seed=seed,
    )


def comparison_matrix(
    systems: Mapping[str, Lines],
    references: Lines,
    metric: Metric | None = None,
    *,
    samples: int = SAMPLES,
    seed: int = SEED,
    copies: int = 1,
) -> Matrix:
    """Compare every system with every other, all on the same resampled test sets.

    copies: how often the test set stands in `references`, such as once for each seed of the systems; all copies of a sentence
    are drawn together.
    """
    if len(systems) < 2:
        raise OptionError(f"{len(systems)} system to compare", fix="give at least two")
    metric = metric or Bleu()
    values, resampled = _resample(list(systems.values()), references, metric, samples, seed, copies)
    every = range(len(values))
    p_values = [[_p_value(values[i], values[j], resampled[i], resampled[j]) for j in every] for i in every]
    return Matrix(
        metric=metric.name,
        signature=_sign(metric, samples, seed),
        names=tuple(systems),
        scores=tuple(_estimate(value, scores) for value, scores in zip(values, resampled, strict=True)),
        p_values=tuple(tuple(row) for row in p_values),
        verdicts=tuple(
            tuple("" if i == j else _verdict(values[i], values[j], p_values[i][j], metric) for j in every) for i in every
        ),
    )


def _resample(
    systems: Sequence[Lines], references: Lines, metric: Metric, samples: int, seed: int, copies: int = 1
) -> tuple[list[float], Numbers]:
    """The score of each system, and its scores on the resampled test sets, [systems, samples], which all systems share."""
    if not 1 <= samples <= MOST_SAMPLES:
        raise OptionError(f"samples is {shown(samples)}", fix=f"1 to {MOST_SAMPLES:,}; 1000 is usual")
    statistics = np.stack([metric.statistics(lines, references) for lines in systems], axis=1)
    statistics = statistics.reshape(copies, -1, *statistics.shape[1:]).sum(axis=0)  # [sentences, systems, terms]
    sentences, count, terms = statistics.shape
    sums = resampled_sums(statistics.reshape(sentences, count * terms), samples, seed).reshape(samples, count, terms)
    return [float(value) for value in metric.values(statistics.sum(axis=0))], metric.values(sums).T


def _estimate(value: float, resampled: Numbers) -> Estimate:
    ordered = np.sort(resampled)
    cut = len(ordered) // 40  # 2.5% on each side
    return Estimate(value, float(ordered[cut]), float(ordered[len(ordered) - cut - 1]))


def _p_value(a: float, b: float, resampled_a: Numbers, resampled_b: Numbers) -> float:
    """The p-value of sacreBLEU's paired bootstrap, as in Moses' bootstrap-hypothesis-difference-significance.pl."""
    if np.array_equal(resampled_a, resampled_b):
        return 1.0
    differences = np.abs(resampled_a - resampled_b)
    exceeding = int((differences - differences.mean() > abs(a - b)).sum())
    return (exceeding + 1) / (len(differences) + 1)


def _verdict(value: float, other: float, p_value: float, metric: Metric) -> Verdict:
    if p_value >= LEVEL or value == other:
        return "="
    return "+" if (value > other) == metric.larger_is_better else "-"


def _sign(metric: Metric, samples: int, seed: int) -> str:
    return f"{metric.signature()}|bs:{samples}|seed:{seed}"


def _letter(index: int) -> str:
    """a, b, ..., z, then a1, b1, ..."""
    return chr(ord("a") + index % 26) + (str(index // 26) if index >= 26 else "")
