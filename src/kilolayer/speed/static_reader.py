"""Searches on a GPU in memory of fixed shape: each step is a single graph launch."""

from __future__ import annotations

import torch
from torch import Tensor

from kilolayer.models.decoder import Decoder
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.runtime.reader import BOS, allowed_length, log_probabilities, right_aligned
from kilolayer.speed.decoding import Size, StaticDecoder, decoders_of
from kilolayer.speed.operators.top import top


class ScoringDecoder(StaticDecoder):
    """A static decoder whose steps return the log-probabilities of all tokens."""

    def __init__(self, model: EncoderDecoder | Decoder, size: Size) -> None:
        super().__init__(model, size)
        precise = torch.promote_types(model.embedding.weight.dtype, torch.float32)
        self.found = torch.zeros(size.rows, size.width, self.vocabulary, dtype=precise, device=self.device)

    def take_step(self) -> None:
        self.found.copy_(log_probabilities(self.read()))
        self.parents.copy_(self.itself)


class StaticReader:
    """Reads in memory of fixed shape. Finished sentences keep their row, and their results are ignored."""

    def __init__(self, model: EncoderDecoder | Decoder, source: Tensor, *, width: int, max_length: int) -> None:
        self.top = top
        reads_source = isinstance(model, EncoderDecoder)
        text = source if reads_source else right_aligned(source)
        length = text.shape[1] if reads_source else text.shape[1] - 1
        self.first = source.new_full((len(source), 1), BOS) if reads_source else text[:, -1:]
        self.max_length = allowed_length(model, max_length, before=0 if reads_source else length)
        self.decoders = decoders_of(model)
        positions = model.config.max_length if reads_source else None
        size = Size.smallest_for(len(source), width, self.max_length, length, positions)
        self.decoder = self.decoders.decoder(ScoringDecoder, model, size)
        if reads_source:
            self.decoders.start_batch(self.decoder, source)
        else:
            self.decoder.start_texts(text[:, :-1])
        self.rows = torch.arange(len(source), device=source.device)

    def branch(self, parents: Tensor) -> None:
        self.decoder.parents[self.rows, : parents.shape[1]] = parents

    def read(self, tokens: Tensor) -> Tensor:
        self.decoder.tokens[self.rows, : tokens.shape[1]] = tokens
        self.decoders.take_step(self.decoder)
        return self.decoder.found[self.rows, : tokens.shape[1]]

    def keep(self, rows: Tensor) -> None:
        self.rows = self.rows[rows]
