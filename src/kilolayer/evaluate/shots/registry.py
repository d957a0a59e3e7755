"""Questions and question sets, and the registry of sets.

Prompts are those of lm-eval, so that numbers can be compared; if one differs, its function says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kilolayer.evaluate.shots.row import Row
from kilolayer.importing import Registry

Norm = Literal["none", "tokens", "bytes", "prior"]
"""How the log-likelihoods of choices are compared: none, unchanged; tokens, divided by the number of tokens of the
continuation; bytes, divided by the bytes of its text without the leading space; prior, minus that after a neutral context."""


@dataclass(frozen=True)
class Question:
    """Choice i is that continuations[i] follows contexts[i]; choices differ in the one or, in partial scoring, in the other.

    prior: a neutral context, for the norm `prior`.
    """

    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    answer: int
    prior: str = ""

    @classmethod
    def of(cls, context: str, choices: Sequence[str], answer: int, prior: str = "") -> Question:
        """A question whose choices follow the same context, after a space."""
        return cls((context,) * len(choices), tuple(f" {choice}" for choice in choices), answer, prior)

    @property
    def solved(self) -> str:
        """The question with its correct answer, for use as an example."""
        return self.contexts[self.answer] + self.continuations[self.answer]


@dataclass(frozen=True)
class QuestionSet:
    """Questions of one kind. norms: how choices are compared; the first is the usual one. LAMBADA's questions have one
    choice."""

    name: str
    columns: tuple[str, ...]
    norms: tuple[Norm, ...]
    read: Callable[[Row], Question]


SETS: Registry[QuestionSet] = Registry("question set", lambda each: f"{each.read.__module__}:{each.read.__qualname__}")


def question_set(
    name: str, *, columns: Sequence[str], norms: Sequence[Norm]
) -> Callable[[Callable[[Row], Question]], Callable[[Row], Question]]:
    """Register a function that reads a line of a set's file."""

    def register(read: Callable[[Row], Question]) -> Callable[[Row], Question]:
        SETS.add(name, QuestionSet(name, tuple(columns), tuple(norms), read))
        return read

    return register
