"""Beam search in memory of fixed shape: as in beam.py, with all choices of a step inside the recorded step.

The device runs from step to step without waiting. The CPU reads the continuations of each step while the next one runs, and
applies the rules of beam.py to them: what is finished, and when a sentence is over. A sentence that is over keeps its row, and
one step more than necessary is run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kilolayer.generate.beam import Sentence, advance, open_first, reorder_by_parent
from kilolayer.generate.hypothesis import Hypothesis
from kilolayer.generate.reader import BOS, EOS, PAD, allowed_length
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.operators.best_tokens import best_tokens
from kilolayer.speed.decoding import Size, StaticDecoder, decoders_of


def static_beam_search(
    model: EncoderDecoder, source: Tensor, limits: list[int], *, beam: int, length_penalty: float, n_best: int = 1
) -> list[list[Hypothesis]]:
    """`beam_search` for a source int64 [batch, length]; limits are reduced to what the model's positions allow."""
    longest = allowed_length(model, max(limits), before=0)
    sentences = [Sentence(min(limit, longest), beam, length_penalty, n_best, by_bound=True) for limit in limits]
    decoders = decoders_of(model)
    size = Size.smallest_for(len(source), beam, longest, source.shape[1], model.config.max_length)
    decoder = decoders.decoder(BeamDecoder, model, size)
    decoders.start_batch(decoder, source)
    running = dict(enumerate(sentences))
    written = torch.empty(decoder.size.rows, beam, 0, dtype=torch.int64)
    decoders.take_step(decoder)
    decoder.send(0)
    for length in range(1, longest + 1):
        if length < longest:
            decoders.take_step(decoder)
            decoder.send(length)
        totals, parents, tokens = decoder.receive(length - 1)
        written = torch.cat([reorder_by_parent(written, parents), tokens[..., None]], dim=2)
        ends = tokens == EOS
        over = advance(running, length, totals, written, ends)
        running = {row: sentence for (row, sentence), is_over in zip(running.items(), over, strict=True) if not is_over}
        if not running:
            break
        written = reorder_by_parent(written, open_first(ends, beam))
    return [sentence.best for sentence in sentences]


class BeamDecoder(StaticDecoder):
    """Each step reads the open hypotheses of each sentence, ranks their continuations and keeps the best open."""

    def __init__(self, model: EncoderDecoder, size: Size) -> None:
        super().__init__(model, size)
        precise = torch.promote_types(model.embedding.weight.dtype, torch.float32)
        self.totals = torch.zeros(size.rows, size.width, dtype=precise, device=self.device)
        """Log-probabilities of the open hypotheses; -inf for unused slots."""
        self.best = torch.zeros(size.rows, 2 * size.width, dtype=precise, device=self.device)
        self.index = torch.zeros(size.rows, 2 * size.width, dtype=torch.int64, device=self.device)
        """Best continuations: their log-probabilities, and parent * vocabulary + token."""
        on_gpu = self.device.type == "cuda"
        self.sent_best = torch.empty(2, *self.best.shape, dtype=precise, pin_memory=on_gpu)
        self.sent_index = torch.empty(2, *self.index.shape, dtype=torch.int64, pin_memory=on_gpu)
        """Host buffers, one for even and one for odd steps, because one is read while the other is written."""
        self.sent = [torch.cuda.Event() for _ in range(2)] if on_gpu else None

    def start_batch(self, source: Tensor) -> None:
        super().start_batch(source)
        self.tokens.fill_(BOS)
        self.totals.fill_(float("-inf"))
        self.totals[: len(source), 0] = 0.0

    def take_step(self) -> None:
        width, vocabulary = self.size.width, self.vocabulary
        # The 2 beam best continuations of a sentence are among the 2 beam best of each hypothesis.
        gains, tokens = best_tokens(self.read(), min(2 * width, vocabulary), barred=(PAD, BOS))
        best, at = (self.totals[..., None] + gains).flatten(1).topk(2 * width, dim=1)
        parents, tokens = at // gains.shape[2], tokens.flatten(1).gather(1, at)
        ends = tokens == EOS
        order = open_first(ends, width)
        self.totals.copy_(best.masked_fill(ends, float("-inf")).gather(1, order))
        self.parents.copy_(parents.gather(1, order))
        self.tokens.copy_(tokens.gather(1, order))
        self.best.copy_(best)
        self.index.copy_(parents * vocabulary + tokens)

    def send(self, step: int) -> None:
        """Start copying the continuations of this step to the CPU, without waiting."""
        self.sent_best[step % 2].copy_(self.best, non_blocking=True)
        self.sent_index[step % 2].copy_(self.index, non_blocking=True)
        if self.sent is not None:
            self.sent[step % 2].record()

    def receive(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """The continuations of this step, the last or the one before: totals, parents and tokens, each [rows, 2 width]."""
        if self.sent is not None:
            self.sent[step % 2].synchronize()
        index = self.sent_index[step % 2]
        return self.sent_best[step % 2], index // self.vocabulary, index % self.vocabulary
