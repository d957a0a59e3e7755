"""Beam search.

    score(y) = log p(y | x) / |y|^penalty, |y| including the end token

as in fairseq. Each step ranks the continuations of a sentence's open hypotheses by log p. Those among the best `beam` that end
are finished; the best `beam` others stay open. The search of a sentence is over when `beam` hypotheses are finished, when the
maximum length is reached (open hypotheses are then finished as they are), or when no open hypothesis can still be among the
n best: log p can only fall and the length is bounded, so log p / longest^penalty bounds every future score.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, isfinite

import torch
from torch import Tensor

from kilolayer.generate.hypothesis import Hypothesis, refuse_nan
from kilolayer.runtime.reader import EOS, Reads, Top, without_gaps


@dataclass
class Sentence:
    """The finished hypotheses of a sentence, and the rule that ends its search."""

    longest: int
    beam: int
    penalty: float
    n_best: int
    by_bound: bool
    count: int = 0
    best: list[Hypothesis] = field(default_factory=list)

    def advance(self, length: int, totals: list[float], ends: list[bool], written: Callable[[int], list[int]]) -> bool:
        """Finish the continuations that end among the best `beam`, or all at the maximum length; returns whether the search is
        over.

        totals, ends: the log-probabilities of the continuations, now of `length` tokens, and whether each ends; best first, NaN
        before all others.
        written: gives the tokens of a continuation by its rank.
        """
        for rank in range(min(self.beam, len(totals))):
            if (ends[rank] or length >= self.longest) and isfinite(totals[rank]):
                self._finish(rank, length, totals[rank], ends[rank], written)
        return self._is_over(length, totals[ends.index(False)] if False in ends else -inf)

    def _finish(self, rank: int, length: int, total: float, end: bool, written: Callable[[int], list[int]]) -> None:
        score = total / length**self.penalty
        self.count += 1
        if len(self.best) < self.n_best or score > self.best[-1].score:
            tokens = written(rank)
            self.best.append(Hypothesis(tokens[:-1] if end else tokens, score, total, end))
            self.best = sorted(self.best, key=lambda each: -each.score)[: self.n_best]

    def _is_over(self, length: int, best_open: float) -> bool:
        refuse_nan(best_open)
        if self.count >= self.beam or length >= self.longest or best_open == -inf:
            return True
        bound = best_open / self.longest**self.penalty
        return self.by_bound and len(self.best) == self.n_best and bound <= self.best[-1].score


def beam_search(
    reader: Reads, limits: list[int], *, beam: int, length_penalty: float, n_best: int = 1, early_stop: bool = True
) -> list[list[Hypothesis]]:
    """The n best hypotheses of each sentence, best first; fewer if there are not enough within the allowed length.

    limits: the maximum length of each sentence.
    early_stop: use the bound above; without it the result is the same, but later.
    """
    sentences = [Sentence(limit, beam, length_penalty, n_best, early_stop) for limit in limits]
    running = dict(enumerate(sentences))
    tokens = reader.first
    totals: Tensor | None = None  # log-probabilities of the open hypotheses [batch, beam]; -inf for unused slots
    written = tokens[:, :, None][..., :0]  # their tokens [batch, beam, length]
    reader.branch(torch.zeros_like(tokens))
    for length in range(1, max(limits) + 1):
        log_probabilities = reader.read(tokens)
        candidates, parents, tokens = _continuations(log_probabilities, totals, beam, reader.top)
        written = torch.cat([reorder_by_parent(written, parents), tokens[..., None]], dim=2)
        ends = tokens == EOS
        over = advance(running, length, candidates, written, ends)
        if all(over):
            break
        order = open_first(ends, beam)
        totals = candidates.masked_fill(ends, float("-inf")).gather(1, order)
        tokens, parents, written = tokens.gather(1, order), parents.gather(1, order), reorder_by_parent(written, order)
        reader.branch(parents)
        if any(over):
            rows = without_gaps(~torch.tensor(over, device=tokens.device))
            reader.keep(rows)
            totals, tokens, written = totals[rows], tokens[rows], written[rows]
            running = dict(enumerate(running[row] for row in rows.tolist()))
    return [sentence.best for sentence in sentences]


def _continuations(log_probabilities: Tensor, totals: Tensor | None, beam: int, top: Top) -> tuple[Tensor, Tensor, Tensor]:
    """The 2 beam best continuations of each sentence: totals, parents and tokens, each [batch, continuations]."""
    if totals is not None:
        log_probabilities = log_probabilities.add_(totals[..., None])
    vocabulary = log_probabilities.shape[-1]
    ranked = log_probabilities.flatten(1)
    totals, index = top(ranked, min(2 * beam, ranked.shape[1]))
    return totals, index // vocabulary, index % vocabulary


def advance(running: dict[int, Sentence], length: int, totals: Tensor, written: Tensor, ends: Tensor) -> list[bool]:
    """Which sentences, by row, are over after these continuations; `written` holds their tokens [rows, continuations, length].

    totals [rows, continuations]: their log-probabilities, best first; ends: bool, of the same shape.
    """
    # As lists: for a few hundred numbers, reading them one by one costs less than tensor operations.
    numbers, ended = totals.tolist(), ends.tolist()
    return [
        sentence.advance(length, numbers[row], ended[row], lambda rank, row=row: written[row, rank].tolist())
        for row, sentence in running.items()
    ]


def open_first(ends: Tensor, beam: int) -> Tensor:
    """Which continuations stay open: bool [rows, continuations] to int64 [rows, beam], open ones first, best first.

    At most `beam` of the 2 beam continuations end: one per hypothesis.
    """
    return ends.long().argsort(dim=1, stable=True)[:, :beam]


def reorder_by_parent(written: Tensor, parents: Tensor) -> Tensor:
    """Reorder [batch, hypotheses, length] by parent, int64 [batch, children]."""
    return written.gather(1, parents[..., None].expand(-1, -1, written.shape[2]))
