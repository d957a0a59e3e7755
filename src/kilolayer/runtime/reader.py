"""Incremental decoding: a model reads hypotheses in parallel, one token of each per step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from kilolayer.errors import InputError
from kilolayer.layers.cache import Cache
from kilolayer.layers.context import Sequences
from kilolayer.models.decoder import Decoder
from kilolayer.models.encoder_decoder import EncoderDecoder

PAD, BOS, EOS = 0, 2, 3
Top = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""The largest of each row, largest first, and their indices: [rows, numbers] and a count to two times [rows, count]."""


class Reads(Protocol):
    """The interface between searches and a model: log-probabilities after one more token of each hypothesis.

    first: int64 [batch, 1], the token that each sentence starts with.
    max_length: the maximum number of tokens that may follow it.
    top: finds the best of what was read.
    """

    first: Tensor
    max_length: int
    top: Top

    def branch(self, parents: Tensor) -> None:
        """Make the next tokens continue these hypotheses: int64 [batch, hypotheses]."""
        ...

    def read(self, tokens: Tensor) -> Tensor:
        """Tokens int64 [batch, hypotheses] to log-probabilities [batch, hypotheses, vocabulary]; -inf for padding and start."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Continue only with these sentences: int64 [rows]."""
        ...


class BeamSteps(Protocol):
    """The steps of a beam search that chooses on the device, for a search that reads what was chosen one step behind.

    rows: of what it chooses; those beyond the batch are to be ignored.
    max_length: the maximum number of tokens of a hypothesis.
    """

    rows: int
    max_length: int

    def take_step(self) -> None:
        """Start the next step: read the open hypotheses, rank their continuations, and keep the best of them open."""
        ...

    def receive(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """The continuations of a step, the last or the one before, best first: totals, parents and tokens [rows, 2 beam]."""
        ...


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row, largest first, and their indices: [rows, numbers] to two times [rows, count]."""
    best, indices = values.topk(count, dim=1)
    return best, indices


class Reader:
    """Reads with a key-value cache that grows at each step."""

    def __init__(
        self, model: EncoderDecoder | Decoder, source: Tensor, *, width: int, max_length: int, top: Top = largest
    ) -> None:
        self.model, self.top = model, top
        before = 0 if isinstance(model, EncoderDecoder) else source.shape[1] - 1
        max_length = self.max_length = allowed_length(model, max_length, before)
        self.cache: Cache = model.new_cache(before + 1 + width * (max_length - 1))
        self.memory: Sequences | None = None
        if isinstance(model, EncoderDecoder):
            memory = model.encode(source)
            self.memory = replace(memory, real=None if memory.real is None else _mask_unless_whole(memory.real))
            self.first = source.new_full((len(source), 1), BOS)
        else:
            text = right_aligned(source)
            self.first = text[:, -1:]
            if before:
                model(text[:, :-1], mask=_mask_unless_whole(text[:, :-1] != PAD), cache=self.cache)

    def branch(self, parents: Tensor) -> None:
        self.cache.branch(parents)

    def read(self, tokens: Tensor) -> Tensor:
        if isinstance(self.model, EncoderDecoder):
            assert self.memory is not None
            logits = self.model.decode(tokens, self.memory, cache=self.cache).logits
        else:
            logits = self.model(tokens, cache=self.cache).logits
        return log_probabilities(logits)

    def keep(self, rows: Tensor) -> None:
        self.cache.keep(rows)
        if self.memory is not None:
            real = self.memory.real
            self.memory = replace(self.memory, states=self.memory.states[rows], real=None if real is None else real[rows])


def allowed_length(model: EncoderDecoder | Decoder, wanted: int, before: int) -> int:
    """How many tokens may be generated after `before` others: what is wanted, or what the model's positions allow."""
    if model.config.max_length is not None:
        wanted = min(wanted, model.config.max_length - before)
    if wanted < 1:
        raise InputError(
            f"the model has learned {model.config.max_length} positions, and the text before takes {before + 1}",
            fix="give a shorter one",
        )
    return wanted


def log_probabilities(logits: Tensor) -> Tensor:
    """Log-probabilities in fp32 or higher. Padding and start get -inf after normalization, so the other scores are the
    model's own."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
    scores[..., PAD] = scores[..., BOS] = float("-inf")
    return scores


def _mask_unless_whole(real: Tensor) -> Tensor | None:
    """`real`, or None if nothing is padding, since then no mask is needed. Checked only on the CPU: a GPU would have to
    synchronize."""
    return None if real.device.type == "cpu" and bool(real.all()) else real


def right_aligned(tokens: Tensor) -> Tensor:
    """[batch, length] with the padding of each row moved to the left."""
    return tokens.gather(1, (tokens != PAD).long().argsort(dim=1, stable=True))


def without_gaps(live: Tensor) -> Tensor:
    """Compact live rows, bool [rows] to int64 [live rows]: rows from the end move into the gaps, all others stay."""
    count = int(live.sum())
    rows = torch.arange(count, device=live.device)
    rows[~live[:count]] = count + live[count:].nonzero()[:, 0]
    return rows
