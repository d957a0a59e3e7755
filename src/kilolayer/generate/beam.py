"""Beam search.

    score(y) = log p(y | x) / |y|^penalty, |y| with its end

as fairseq defines it. Each step ranks the continuations of a sentence's open hypotheses by log p. Those among the best `beam`
that end are finished; the best `beam` others stay open. The search of a sentence is over when `beam` hypotheses are finished,
when the longest allowed length is reached (what is open there is finished as it stands), or when no open hypothesis can still
come among the n best: log p only falls and the length is bounded, so that log p / longest^penalty bounds every future score.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isfinite, isnan, nan

import torch
from torch import Tensor

from kilolayer.generate.hypothesis import Hypothesis, refuse_nan
from kilolayer.generate.reader import EOS, Reads, without_gaps
from kilolayer.generate.top import top


@dataclass
class _Sentence:
    """The finished hypotheses of a sentence and the rule that ends its search."""

    longest: int
    beam: int
    penalty: float
    n_best: int
    by_bound: bool
    count: int = 0
    best: list[Hypothesis] = field(default_factory=list)

    def finish(self, tokens: list[int], log_probability: float) -> None:
        ended = tokens[-1] == EOS
        score = log_probability / len(tokens) ** self.penalty
        self.count += 1
        self.best.append(Hypothesis(tokens[:-1] if ended else tokens, score, log_probability, ended))
        self.best = sorted(self.best, key=lambda each: -each.score)[: self.n_best]

    def is_over(self, length: int, best_open: float) -> bool:
        refuse_nan(best_open)
        if self.count >= self.beam or length >= self.longest or best_open == float("-inf"):
            return True
        bound = best_open / self.longest**self.penalty
        return self.by_bound and len(self.best) == self.n_best and bound <= self.best[-1].score


def beam_search(
    reader: Reads, limits: list[int], *, beam: int, length_penalty: float, n_best: int = 1, early_stop: bool = True
) -> list[list[Hypothesis]]:
    """The n best hypotheses of each sentence, best first; fewer where there are not so many of the allowed length.

    limits: the longest length of each sentence. early_stop: by the bound above; without it the result is the same, later.
    """
    sentences = [_Sentence(limit, beam, length_penalty, n_best, early_stop) for limit in limits]
    running = list(sentences)
    tokens = reader.first
    totals: Tensor | None = None  # log-probabilities of the open hypotheses [batch, beam]; -inf where there is none
    written = tokens[:, :, None][..., :0]  # their tokens [batch, beam, length]
    reader.branch(torch.zeros_like(tokens))
    for length in range(1, max(limits) + 1):
        log_probabilities = reader.read(tokens)
        candidates, parents, tokens = _continuations(log_probabilities, totals, beam)
        written = torch.cat([_of_parents(written, parents), tokens[..., None]], dim=2)
        ends = tokens == EOS
        over = _finish(running, length, candidates, written, ends)
        if all(over):
            break
        # Open hypotheses first, in the order of their rank; at most `beam` of the 2 beam candidates end.
        order = ends.long().argsort(dim=1, stable=True)[:, :beam]
        totals = candidates.masked_fill(ends, float("-inf")).gather(1, order)
        tokens, parents, written = tokens.gather(1, order), parents.gather(1, order), _of_parents(written, order)
        reader.branch(parents)
        if any(over):
            rows = without_gaps(~torch.tensor(over, device=tokens.device))
            reader.keep(rows)
            totals, tokens, written = totals[rows], tokens[rows], written[rows]
            running = [running[row] for row in rows.tolist()]
    return [sentence.best for sentence in sentences]


def _continuations(log_probabilities: Tensor, totals: Tensor | None, beam: int) -> tuple[Tensor, Tensor, Tensor]:
    """The 2 beam best continuations of each sentence: totals, parents and tokens, each [batch, continuations]."""
    if totals is not None:
        log_probabilities = log_probabilities.add_(totals[..., None])
    vocabulary = log_probabilities.shape[-1]
    ranked = log_probabilities.flatten(1)
    totals, index = top(ranked, min(2 * beam, ranked.shape[1]))
    return totals, index // vocabulary, index % vocabulary


def _finish(running: list[_Sentence], length: int, totals: Tensor, written: Tensor, ends: Tensor) -> list[bool]:
    """Hand over what ends among the best `beam`, or at the longest length; which sentences are over."""
    over = []
    # As lists: a few hundred numbers, of which one by one is asked, cost less than the calls that would ask all at once.
    for row, (sentence, numbers, ended) in enumerate(zip(running, totals.tolist(), ends.tolist(), strict=True)):
        done = [length >= sentence.longest or end for end in ended[: sentence.beam]]
        for rank, (total, is_done) in enumerate(zip(numbers, done, strict=False)):
            if is_done and isfinite(total):
                sentence.finish(written[row, rank].tolist(), total)
        open_ = [total for total, end in zip(numbers, ended, strict=True) if not end]
        over.append(sentence.is_over(length, nan if any(map(isnan, open_)) else max(open_, default=-inf)))
    return over


def _of_parents(written: Tensor, parents: Tensor) -> Tensor:
    """[batch, hypotheses, length] in the order of int64 [batch, children]."""
    return written.gather(1, parents[..., None].expand(-1, -1, written.shape[2]))
