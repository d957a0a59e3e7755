"""Corpus scores of translations, with the signature that says how each was computed.

Every score here is a function of sums over sentences. `statistics` gives the terms of each sentence, and `values` the scores of
any number of such sums at once, so a corpus can be resampled a thousand times (`significance.py`).
"""

from __future__ import annotations

import hashlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.base import Metric as SacreMetric
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

from kilolayer.data.parallel import Direction
from kilolayer.errors import InputError, OptionError, unknown
from kilolayer.files.reading import read_bytes

Lines = Sequence[str]
Numbers = NDArray[np.float64]

TOKENIZERS = ("13a", "none", "intl", "char", "zh")
"""sacreBLEU's tokenizers that need no download and no further package."""

SENTENCE_ENDS = (".", "!", "?", "。", "।")


@dataclass(frozen=True)
class Score:
    """A corpus score, from 0 to 100 (TER may exceed 100), and how it was computed."""

    name: str
    value: float
    signature: str

    def __str__(self) -> str:
        return f"{self.name} {self.value:.2f} ({self.signature})"


@dataclass(frozen=True)
class Unavailable:
    """A score that cannot be computed on this machine, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} not available: {self.reason}"


class Metric(ABC):
    """A corpus score of hypotheses against one reference each."""

    key: ClassVar[str]
    """Its name in scores.json."""
    name: ClassVar[str]
    larger_is_better: ClassVar[bool] = True

    def score(self, hypotheses: Lines, references: Lines) -> Score:
        """The score of the whole corpus."""
        sums = self.statistics(hypotheses, references).sum(axis=0)
        return Score(self.name, float(self.values(sums)), self.signature())

    def missing(self) -> str:
        """What this machine lacks to compute it, in words; empty if nothing is missing."""
        return ""

    @abstractmethod
    def statistics(self, hypotheses: Lines, references: Lines) -> Numbers:
        """[sentences, terms]: what each sentence adds to the sums from which the score is computed."""

    @abstractmethod
    def values(self, sums: Numbers) -> Numbers:
        """The scores [...] of the sums [..., terms]."""

    @abstractmethod
    def signature(self) -> str:
        """How the score is computed, so that it can be reproduced."""


class SacreScore(Metric):
    """A score whose statistics, tokenisation and signature are sacreBLEU's."""

    @abstractmethod
    def sacre(self) -> SacreMetric:
        """The sacreBLEU metric object."""

    def statistics(self, hypotheses: Lines, references: Lines) -> Numbers:
        check_aligned(hypotheses, references)
        return np.array(self.sacre()._extract_corpus_statistics(hypotheses, [references]), dtype=np.float64)

    def score(self, hypotheses: Lines, references: Lines) -> Score:
        check_aligned(hypotheses, references)
        return Score(self.name, float(self.sacre().corpus_score(hypotheses, [references]).score), self.signature())

    def signature(self) -> str:
        sacre = self.sacre()
        sacre.corpus_score(["x"], [["x"]])  # sacreBLEU signs only after it has seen the number of references
        return str(sacre.get_signature())


@dataclass(frozen=True)
class Bleu(SacreScore):
    """BLEU (Papineni et al. 2002): brevity penalty times the geometric mean of the 1- to 4-gram precisions."""

    lowercase: bool = False
    """Ignore case."""
    tokenize: str = "13a"
    """sacreBLEU's tokenizer; "none" for text that is already tokenized."""

    key: ClassVar[str] = "bleu"
    name: ClassVar[str] = "BLEU"

    def __post_init__(self) -> None:
        if self.tokenize not in TOKENIZERS:
            raise unknown(self.tokenize, TOKENIZERS, kind="tokeniser", where="in BLEU's `tokenize`")

    def sacre(self) -> SacreMetric:
        # Without `force`, sacreBLEU warns about text that looks tokenized, even where that is intended.
        return BLEU(lowercase=self.lowercase, tokenize=self.tokenize, force=self.tokenize == "none")

    def values(self, sums: Numbers) -> Numbers:
        return _bleu(sums)


@dataclass(frozen=True)
class TokenisedBleu(SacreScore):
    """BLEU on space-separated tokens, as papers report it for text tokenized beforehand, with punctuation split off."""

    key: ClassVar[str] = "tokenised_bleu"
    name: ClassVar[str] = "tokenised BLEU"

    def sacre(self) -> SacreMetric:
        return BLEU(tokenize="none", force=True)

    def values(self, sums: Numbers) -> Numbers:
        return _bleu(sums)


@dataclass(frozen=True)
class Chrf(SacreScore):
    """chrF++ (Popović 2017): F2 of the mean precision and recall over 1- to 6-grams of characters, 1- and 2-grams of words."""

    lowercase: bool = False
    """Ignore case."""

    key: ClassVar[str] = "chrf"
    name: ClassVar[str] = "chrF++"

    def sacre(self) -> SacreMetric:
        return CHRF(word_order=2, lowercase=self.lowercase)

    def values(self, sums: Numbers) -> Numbers:
        hypothesis, reference, matches = sums[..., 0::3], sums[..., 1::3], sums[..., 2::3]
        counted = (hypothesis > 0) & (reference > 0)  # an order for which no sentence is long enough is left out
        orders = np.maximum(counted.sum(axis=-1), 1)
        precision = np.where(counted, matches / np.maximum(hypothesis, 1), 0.0).sum(axis=-1) / orders
        recall = np.where(counted, matches / np.maximum(reference, 1), 0.0).sum(axis=-1) / orders
        denominator = 4 * precision + recall
        return 100 * 5 * precision * recall / np.where(denominator > 0, denominator, 1.0)


@dataclass(frozen=True)
class Ter(SacreScore):
    """TER (Snover et al. 2006): edits, including moves of phrases, per reference word. Smaller is better."""

    key: ClassVar[str] = "ter"
    name: ClassVar[str] = "TER"
    larger_is_better: ClassVar[bool] = False

    def sacre(self) -> SacreMetric:
        return TER()

    def values(self, sums: Numbers) -> Numbers:
        edits, length = sums[..., 0], sums[..., 1]
        return 100 * np.where(length > 0, edits / np.where(length > 0, length, 1.0), edits > 0)


@dataclass(frozen=True)
class SpBleu(SacreScore):
    """spBLEU (Goyal et al. 2022): BLEU on the pieces of a SentencePiece model, comparable across languages."""

    model: Path
    """The SentencePiece model. Scores under different models cannot be compared, so the signature contains its hash."""
    lowercase: bool = False
    """Ignore case."""

    key: ClassVar[str] = "spbleu"
    name: ClassVar[str] = "spBLEU"

    def __post_init__(self) -> None:
        try:
            self._processor  # noqa: B018  an invalid model file is refused at once
        except (RuntimeError, UnicodeDecodeError):
            raise OptionError("not a SentencePiece model", where=str(self.model), fix="give a trained .model file") from None

    @cached_property
    def _bytes(self) -> bytes:
        return read_bytes(self.model)

    @cached_property
    def _processor(self) -> Any:
        from sentencepiece import SentencePieceProcessor

        return SentencePieceProcessor(model_proto=self._bytes)

    def _pieces(self, lines: Lines) -> list[str]:
        cased = [line.lower() if self.lowercase else line for line in lines]
        return [" ".join(self._processor.encode(line.rstrip(), out_type=str)) for line in cased]

    def sacre(self) -> SacreMetric:
        return BLEU(lowercase=self.lowercase, tokenize="none", force=True)

    def statistics(self, hypotheses: Lines, references: Lines) -> Numbers:
        return super().statistics(self._pieces(hypotheses), self._pieces(references))

    def score(self, hypotheses: Lines, references: Lines) -> Score:
        return super().score(self._pieces(hypotheses), self._pieces(references))

    def values(self, sums: Numbers) -> Numbers:
        return _bleu(sums)

    def signature(self) -> str:
        digest = hashlib.sha256(self._bytes).hexdigest()[:8]
        return super().signature().replace("tok:none", f"tok:spm-{digest}")


@dataclass(frozen=True)
class Meteor(Metric):
    """nltk's METEOR, averaged over sentences. It is not METEOR 1.5, and its synonyms are English."""

    key: ClassVar[str] = "meteor"
    name: ClassVar[str] = "METEOR"

    def missing(self) -> str:
        if importlib.util.find_spec("nltk") is None:
            return "nltk is not installed (pip install nltk)"
        from nltk.corpus import wordnet  # pyright: ignore[reportMissingImports]

        try:
            wordnet.ensure_loaded()
        except LookupError:
            return "nltk's WordNet data is not there (python -m nltk.downloader wordnet)"
        return ""

    def statistics(self, hypotheses: Lines, references: Lines) -> Numbers:
        check_aligned(hypotheses, references)
        if reason := self.missing():
            raise OptionError("METEOR is not available", where=reason, fix="install it, or leave METEOR out")
        from nltk.translate.meteor_score import meteor_score  # pyright: ignore[reportMissingImports]

        pairs = zip(words(hypotheses), words(references), strict=True)
        return np.array([(meteor_score([reference], hypothesis), 1) for hypothesis, reference in pairs], dtype=np.float64)

    def values(self, sums: Numbers) -> Numbers:
        return 100 * sums[..., 0] / sums[..., 1]

    def signature(self) -> str:
        import nltk  # pyright: ignore[reportMissingImports]

        return f"nrefs:1|case:lc|tok:13a|mean:sentences|nltk:{nltk.__version__}"


_tokenize = Tokenizer13a()

STANDARD: tuple[Metric, ...] = (Bleu(), Chrf(), Ter())


def score_all(hypotheses: Lines, references: Lines, metrics: Sequence[Metric] = STANDARD) -> dict[str, Score | Unavailable]:
    """Each metric's score by key; one that cannot be computed here gives the reason, and does not stop the others."""
    check_aligned(hypotheses, references)
    found: dict[str, Score | Unavailable] = {}
    for metric in metrics:
        reason = metric.missing()
        found[metric.key] = Unavailable(metric.name, reason) if reason else metric.score(hypotheses, references)
    return found


def pivot_averages(values: Mapping[Direction, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Means over directions into and out of the language that all directions share: "xx-en" and "en-xx".

    values: the scores of each direction by key; a key is averaged if all directions of a side have it. Empty if the directions
    have no single language in common.
    """
    shared = set.intersection(*({each.source, each.target} for each in values)) if values else set[str]()
    if len(shared) != 1:
        return {}
    (pivot,) = shared
    sides = {
        f"xx-{pivot}": [scores for direction, scores in values.items() if direction.target == pivot],
        f"{pivot}-xx": [scores for direction, scores in values.items() if direction.source == pivot],
    }
    return {
        name: {key: sum(scores[key] for scores in side) / len(side) for key in side[0] if all(key in scores for scores in side)}
        for name, side in sides.items()
        if side
    }


def _bleu(sums: Numbers) -> Numbers:
    """BLEU from sums: lengths of hypothesis and reference, then matches and totals of 1- to 4-grams."""
    hypothesis, reference, matches, totals = sums[..., 0], sums[..., 1], sums[..., 2:6], sums[..., 6:10]
    penalty = np.exp(np.minimum(0.0, 1 - reference / np.maximum(hypothesis, 1)))
    # sacreBLEU's smoothing "exp": the k-th order without a match counts as 1 / 2^k matches.
    smoothed = np.where(matches > 0, matches, 0.5 ** np.cumsum(matches == 0, axis=-1))
    geometric_mean = np.exp(np.log(smoothed / np.maximum(totals, 1)).mean(axis=-1))
    possible = (matches > 0).any(axis=-1) & (totals > 0).all(axis=-1)
    return np.where(possible, 100 * penalty * geometric_mean, 0.0)


def words(lines: Lines) -> list[list[str]]:
    """The words of each line as BLEU counts them, with punctuation split off (mteval's 13a)."""
    return [_tokenize(line.rstrip()).split() for line in lines]


def check_tokenised(references: Lines, where: str = "") -> None:
    """Raise if sentences end in punctuation attached to the last word, as in text that is not tokenized."""
    ends = [line.rstrip() for line in references if line.rstrip().endswith(SENTENCE_ENDS)]
    joined = [line for line in ends if len(line) > 1 and not line[-2].isspace()]
    if 2 * len(joined) > len(ends):
        raise InputError(
            f"the references are not tokenised: {len(joined)} of {len(ends)} final punctuation marks are attached to a word",
            where=where,
            fix="leave out tokenised BLEU, or train and test on tokenised text",
        )


def check_aligned(hypotheses: Lines, references: Lines) -> None:
    """Raise unless there is exactly one reference per hypothesis, and at least one."""
    if len(hypotheses) != len(references):
        raise InputError(
            f"hypotheses and references differ in number: {len(hypotheses):,} and {len(references):,}",
            fix="give one reference for each line that was translated, in the same order",
        )
    if not hypotheses:
        raise InputError("there is nothing to score: no hypotheses", fix="give at least one line")
