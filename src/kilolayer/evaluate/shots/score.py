"""Score a question set: how many questions a language model answers correctly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from kilolayer.data.vocabulary import TextVocabulary
from kilolayer.evaluate.choices import Likelihood, score_choices
from kilolayer.evaluate.likelihood import perplexity
from kilolayer.evaluate.shots.examples import Examples
from kilolayer.evaluate.shots.registry import Norm, Question
from kilolayer.models.decoder import Decoder
from kilolayer.version import VERSION


@dataclass(frozen=True)
class ShotScore:
    """A score, with what it depends on.

    norm: how choices were compared; with `greedy`, a single continuation is right if it is what the model would generate.
    chance: the accuracy of guessing; None if there are no choices.
    cut: the number of questions whose beginning the model did not read.
    """

    task: str
    shots: int
    metric: Literal["accuracy", "perplexity"]
    norm: Norm | Literal["greedy"]
    value: float
    standard_error: float | None
    chance: float | None
    questions: int
    cut: int
    signature: str

    def table(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def score_set(
    model: Decoder,
    vocabulary: TextVocabulary,
    length: int,
    examples: Examples,
    *,
    shots: int,
    seed: int = 0,
    limit: int | None = None,
) -> list[ShotScore]:
    """The scores of a set's first `limit` questions under each of its norms. length: the model's context length in tokens."""
    examples.check(shots, limit)
    count = min(len(examples.asked.questions), limit or len(examples.asked.questions))
    prompts = [examples.prompt(number, shots, seed) for number in range(count)]
    likelihoods = score_choices(model, vocabulary, _choices(prompts), length)
    found = _by_question(prompts, likelihoods)
    cut = sum(any(each.cut for each in some) for some in found)
    about = f"{examples.signature(shots, seed, limit)}|length:{length}"
    version = f"version:{VERSION}"

    def score(metric: Literal["accuracy", "perplexity"], norm: Norm | Literal["greedy"], values: Sequence[float]) -> ShotScore:
        chance = None if norm == "greedy" else float(np.mean([1 / len(prompt.contexts) for prompt in prompts]))
        value, error = mean_and_error(values) if metric == "accuracy" else _perplexity(values)
        signature = f"{about}|metric:{metric}|norm:{norm}|{version}"
        return ShotScore(examples.set.name, shots, metric, norm, value, error, chance, count, cut, signature)

    if not examples.set.norms:
        logs = [some[0].log_likelihood for some in found]
        return [
            score("accuracy", "greedy", [float(some[0].greedy) for some in found]),
            score("perplexity", "greedy", logs),
        ]
    priors = _priors(model, vocabulary, length, prompts) if "prior" in examples.set.norms else {}
    answered = list(zip(prompts, found, strict=True))
    return [
        score("accuracy", norm, [float(_best(prompt, some, norm, priors) == prompt.answer) for prompt, some in answered])
        for norm in examples.set.norms
    ]


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of values that are 0 or 1, and its standard error sqrt(p (1 - p) / (n - 1)); None for a single value."""
    mean = float(np.mean(values))
    return mean, math.sqrt(mean * (1 - mean) / (len(values) - 1)) if len(values) > 1 else None


def _perplexity(logs: Sequence[float]) -> tuple[float, float | None]:
    """exp(-mean log-likelihood) of the answers, and its standard error: that of the mean, times the perplexity."""
    value = perplexity(-float(np.mean(logs)))
    return value, value * float(np.std(logs, ddof=1)) / math.sqrt(len(logs)) if len(logs) > 1 else None


def _choices(prompts: Sequence[Question]) -> Iterator[tuple[str, str]]:
    return (pair for prompt in prompts for pair in zip(prompt.contexts, prompt.continuations, strict=True))


def _by_question(prompts: Sequence[Question], likelihoods: Sequence[Likelihood]) -> list[list[Likelihood]]:
    rest = iter(likelihoods)
    return [[next(rest) for _ in prompt.contexts] for prompt in prompts]


def _priors(
    model: Decoder, vocabulary: TextVocabulary, length: int, prompts: Sequence[Question]
) -> dict[tuple[str, str], float]:
    """The log-likelihood of each answer after its neutral context."""
    pairs = list(dict.fromkeys((prompt.prior, text) for prompt in prompts for text in prompt.continuations))
    found = score_choices(model, vocabulary, pairs, length)
    return {pair: each.log_likelihood for pair, each in zip(pairs, found, strict=True)}


def _best(prompt: Question, found: Sequence[Likelihood], norm: Norm, priors: dict[tuple[str, str], float]) -> int:
    """The index of the most likely choice; the first, if several are equal."""
    values = [each.log_likelihood for each in found]
    match norm:
        case "tokens":
            values = [value / max(1, each.tokens) for value, each in zip(values, found, strict=True)]
        case "bytes":
            sizes = [len(text.removeprefix(" ").encode()) for text in prompt.continuations]
            values = [value / max(1, size) for value, size in zip(values, sizes, strict=True)]
        case "prior":
            texts = prompt.continuations
            values = [value - priors[prompt.prior, text] for value, text in zip(values, texts, strict=True)]
        case "none":
            pass
    return int(np.argmax(values))
