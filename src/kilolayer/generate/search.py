"""Searching a model for its output: greedy, by beam, or by sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kilolayer.errors import InputError
from kilolayer.generate.beam import beam_search
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.hypothesis import Hypothesis
from kilolayer.generate.reader import EOS, PAD, Reader, without_gaps
from kilolayer.generate.sample import draw, uniforms
from kilolayer.generate.top import top
from kilolayer.models.decoder import Decoder
from kilolayer.models.encoder_decoder import EncoderDecoder

__all__ = ["Hypothesis", "beam_search", "generate", "greedy", "sample"]

# From log-probabilities [batch, hypotheses, vocabulary], the batch's rows in the input int64 [batch], and the step,
# to tokens int64 [batch, hypotheses].
Choose = Callable[[Tensor, Tensor, int], Tensor]


@torch.inference_mode()
def generate(
    model: EncoderDecoder | Decoder, source: Tensor, config: SearchConfig, *, indices: Sequence[int] | None = None
) -> list[list[Hypothesis]]:
    """The hypotheses of each sentence, in the order of the input.

    source: int64 [batch, length], right-padded with 0; for a `Decoder`, the text to continue.
    indices: the number of each sentence, which keys what is sampled for it; by default 0, 1, 2...
    Dropout is off while this runs. Padding and start are never generated.
    """
    if source.dim() != 2 or 0 in source.shape:
        raise InputError(
            f"a source of shape {list(source.shape)}", fix="give int64 ids of shape [batch, length], at least 1 x 1"
        )
    lengths = (source != PAD).sum(dim=1).tolist()
    if 0 in lengths:
        raise InputError(
            f"row {lengths.index(0)} of the source is padding alone", fix="give each sentence at least its end token"
        )
    was_training = model.training
    model.eval()
    try:
        limits = [config.max_length(length) for length in lengths]
        reader = Reader(model, source, width=config.width, max_length=max(limits))
        limits = [min(limit, reader.max_length) for limit in limits]
        return _search(reader, limits, config, range(len(source)) if indices is None else indices)
    finally:
        model.train(was_training)


def _search(reader: Reader, limits: list[int], config: SearchConfig, indices: Sequence[int]) -> list[list[Hypothesis]]:
    if config.method == "greedy":
        return greedy(reader, limits)
    if config.method == "beam":
        penalty = 1.0 if config.length_penalty is None else config.length_penalty
        return beam_search(reader, limits, beam=config.width, length_penalty=penalty, n_best=config.n_best)
    return sample(
        reader,
        limits,
        samples=config.n_best,
        indices=indices,
        seed=config.seed or 0,
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
    )


def greedy(reader: Reader, limits: list[int]) -> list[list[Hypothesis]]:
    """The most probable token at each step."""
    return _follow(reader, limits, 1, lambda log_probabilities, rows, step: top(log_probabilities[:, 0], 1)[1])


def sample(
    reader: Reader,
    limits: list[int],
    *,
    samples: int,
    indices: Sequence[int],
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> list[list[Hypothesis]]:
    """So many independent samples of each sentence, in the order drawn."""
    numbers = uniforms(seed, indices, samples, max(limits)).to(reader.first.device)

    def choose(log_probabilities: Tensor, rows: Tensor, step: int) -> Tensor:
        return draw(log_probabilities, numbers[rows, :, step], temperature=temperature, top_k=top_k, top_p=top_p)

    return _follow(reader, limits, samples, choose)


def _follow(reader: Reader, limits: list[int], width: int, choose: Choose) -> list[list[Hypothesis]]:
    """Extend `width` hypotheses of each sentence token by token, each on its own, until all have ended."""
    tokens, longest = reader.first, torch.tensor(limits, device=reader.first.device)
    batch, device = len(tokens), tokens.device
    written = torch.full((batch, width, max(limits)), EOS, device=device)
    lengths = torch.zeros(batch, width, dtype=torch.int64, device=device)
    ended = torch.zeros(batch, width, dtype=torch.bool, device=device)
    totals = torch.zeros(batch, width, dtype=torch.float64, device=device)
    rows, open_ = torch.arange(batch, device=device), ~ended  # of the sentences that go on
    reader.branch(torch.zeros_like(tokens))
    for step in range(max(limits)):
        log_probabilities = reader.read(tokens).expand(-1, width, -1)
        tokens = choose(log_probabilities, rows, step).masked_fill(~open_, EOS)
        gains = log_probabilities.gather(2, tokens[..., None])[..., 0]
        totals[rows] += gains.masked_fill(~open_, 0.0)
        written[rows, :, step] = tokens
        lengths[rows] += open_
        ended[rows] |= tokens == EOS
        open_ = open_ & (tokens != EOS) & (step + 1 < longest[rows])[:, None]
        live = open_.any(dim=1)
        if not live.any():
            break
        if step == 0 and width > 1:
            reader.branch(torch.zeros_like(tokens))
        if not live.all():
            kept = without_gaps(live)
            reader.keep(kept)
            rows, tokens, open_ = rows[kept], tokens[kept], open_[kept]
    found = zip(written.tolist(), lengths.tolist(), totals.tolist(), ended.tolist(), strict=True)
    return [[_hypothesis(*each) for each in zip(*sentence, strict=True)] for sentence in found]


def _hypothesis(tokens: list[int], length: int, total: float, ended: bool) -> Hypothesis:
    return Hypothesis(tokens[: length - ended], total, total, ended)
