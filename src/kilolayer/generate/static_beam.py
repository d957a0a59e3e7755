"""Beam search over steps that choose on the device: the rules of beam.py, one step behind.

The device runs from step to step without waiting. The CPU reads the continuations of each step while the next one runs, and
applies the rules of beam.py to them: what is finished, and when a sentence is over. A sentence that is over keeps its row, and
one step more than necessary is run.
"""

from __future__ import annotations

import torch

from kilolayer.generate.beam import Sentence, advance, open_first, reorder_by_parent
from kilolayer.generate.hypothesis import Hypothesis
from kilolayer.runtime.reader import EOS, BeamSteps


def static_beam_search(
    steps: BeamSteps, limits: list[int], *, beam: int, length_penalty: float, n_best: int = 1
) -> list[list[Hypothesis]]:
    """`beam_search` over the steps of a batch; limits are reduced to what the model's positions allow."""
    longest = steps.max_length
    sentences = [Sentence(min(limit, longest), beam, length_penalty, n_best, by_bound=True) for limit in limits]
    running = dict(enumerate(sentences))
    written = torch.empty(steps.rows, beam, 0, dtype=torch.int64)
    steps.take_step()
    for length in range(1, longest + 1):
        if length < longest:
            steps.take_step()
        totals, parents, tokens = steps.receive(length - 1)
        written = torch.cat([reorder_by_parent(written, parents), tokens[..., None]], dim=2)
        ends = tokens == EOS
        over = advance(running, length, totals, written, ends)
        running = {row: sentence for (row, sentence), is_over in zip(running.items(), over, strict=True) if not is_over}
        if not running:
            break
        written = reorder_by_parent(written, open_first(ends, beam))
    return [sentence.best for sentence in sentences]
