"""Error analysis: word accuracy by training frequency, and BLEU by sentence length.

As in Figure 3 of the very-deep paper (Liu et al. 2020), whose numbers came from compare-mt (Neubig et al. 2019). Words are
those of sacreBLEU's 13a tokenizer, in training text and translations alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kilolayer.errors import OptionError
from kilolayer.evaluate.scores import Bleu, Lines, Metric, check_aligned, words

FREQUENCY_EDGES = (1, 2, 3, 4, 5, 10, 100, 1000)  # compare-mt's
LENGTH_EDGES = (10, 20, 30, 40, 50, 60)  # compare-mt's


@dataclass(frozen=True)
class FrequencyBucket:
    """Words seen `low` to `high` times in training (unbounded if high is None), with their counts over the test set."""

    label: str
    low: int
    high: int | None
    matched: int
    reference: int
    hypothesis: int

    @property
    def precision(self) -> float:
        """The fraction of the words produced that are also in the reference."""
        return self.matched / self.hypothesis if self.hypothesis else 0.0

    @property
    def recall(self) -> float:
        """The fraction of the reference's words that were produced."""
        return self.matched / self.reference if self.reference else 0.0

    @property
    def f1(self) -> float | None:
        """2 P R / (P + R); None if the bucket has no words, produced or in the reference."""
        total = self.hypothesis + self.reference
        return 2 * self.matched / total if total else None

    def to_json(self) -> dict[str, Any]:
        """Plain values for scores.json."""
        return {**vars(self), "precision": self.precision, "recall": self.recall, "f1": self.f1}


@dataclass(frozen=True)
class LengthBucket:
    """Sentences whose reference has `low` to `high` words (unbounded if high is None); bleu is None if there are none."""

    label: str
    low: int
    high: int | None
    sentences: int
    bleu: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain values for scores.json."""
        return dict(vars(self))


def word_frequencies(lines: Iterable[str]) -> Counter[str]:
    """How often each word occurs in the training text; the lines are read once and not stored."""
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(words([line])[0])
    return counts


def accuracy_by_frequency(
    hypotheses: Lines, references: Lines, frequencies: Mapping[str, int], edges: Sequence[int] = FREQUENCY_EDGES
) -> list[FrequencyBucket]:
    """Word accuracy by training frequency. In each sentence a word matches as often as both hypothesis and reference contain
    it."""
    check_aligned(hypotheses, references)
    spans = _spans(edges)
    counts = [[0, 0, 0] for _ in spans]
    for produced, wanted in zip(words(hypotheses), words(references), strict=True):
        produced_counts, wanted_counts = Counter(produced), Counter(wanted)
        for column, bag in enumerate((produced_counts & wanted_counts, wanted_counts, produced_counts)):
            for word, count in bag.items():
                counts[bisect_right(edges, frequencies.get(word, 0))][column] += count
    return [FrequencyBucket(_label(*span), *span, *count) for span, count in zip(spans, counts, strict=True)]


def bleu_by_length(
    hypotheses: Lines, references: Lines, edges: Sequence[int] = LENGTH_EDGES, metric: Metric | None = None
) -> list[LengthBucket]:
    """Corpus BLEU of the sentences in each length bucket.

    The length is the reference's, so that every system is scored on the same sentences (compare-mt uses the hypothesis's).
    """
    check_aligned(hypotheses, references)
    metric = metric or Bleu()
    spans = _spans(edges)
    members: list[list[int]] = [[] for _ in spans]
    for index, wanted in enumerate(words(references)):
        members[bisect_right(edges, len(wanted))].append(index)
    buckets: list[LengthBucket] = []
    for (low, high), indices in zip(spans, members, strict=True):
        bleu = None
        if indices:
            bleu = metric.score([hypotheses[i] for i in indices], [references[i] for i in indices]).value
        buckets.append(LengthBucket(_label(low, high), low, high, len(indices), bleu))
    return buckets


def _spans(edges: Sequence[int]) -> list[tuple[int, int | None]]:
    """First and last value of each bucket: edges 1, 5 give 0 to 0, 1 to 4, and 5 onwards."""
    if not edges or edges[0] < 1 or any(a >= b for a, b in pairwise(edges)):
        raise OptionError(f"the edges of the buckets are {list(edges)}", fix="give increasing whole numbers above 0")
    lows = [0, *edges]
    highs = [edge - 1 for edge in edges]
    return list(zip(lows, [*highs, None], strict=True))


def _label(low: int, high: int | None) -> str:
    if high is None:
        return f"{low}+"
    return str(low) if low == high else f"{low}-{high}"
