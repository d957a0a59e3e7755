"""The steps of a beam search in memory of fixed shape, with all choices of a step inside the recorded step."""

from __future__ import annotations

import torch
from torch import Tensor

from kilolayer.generate.beam import open_first
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.runtime.reader import BOS, EOS, PAD, allowed_length
from kilolayer.speed.decoding import Size, StaticDecoder, decoders_of
from kilolayer.speed.operators.best_tokens import best_tokens


class StaticBeam:
    """The steps of a beam search over a source, int64 [batch, length], as recorded graphs."""

    def __init__(self, model: EncoderDecoder, source: Tensor, *, beam: int, max_length: int) -> None:
        self.max_length = allowed_length(model, max_length, before=0)
        size = Size.smallest_for(len(source), beam, self.max_length, source.shape[1], model.config.max_length)
        self.decoders = decoders_of(model)
        self.decoder = self.decoders.decoder(BeamDecoder, model, size)
        self.decoders.start_batch(self.decoder, source)
        self.rows, self.taken = size.rows, 0

    def take_step(self) -> None:
        self.decoders.take_step(self.decoder)
        self.decoder.send(self.taken)
        self.taken += 1

    def receive(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.decoder.receive(step)


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
