"""Decode a model's output by greedy search, beam search or sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kilolayer.errors import InputError
from kilolayer.generate.beam import beam_search
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.hypothesis import Hypothesis
from kilolayer.generate.sample import draw, uniforms
from kilolayer.generate.static_beam import static_beam_search
from kilolayer.layers.modules import in_mode
from kilolayer.models.decoder import Decoder
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.models.shards import group_in_step
from kilolayer.parallel.collectives import from_first, gather
from kilolayer.parallel.peers import Peers
from kilolayer.runtime.reader import EOS, PAD, Reads, Top, without_gaps
from kilolayer.runtime.runtime import runtime_of

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
    indices: the number of each sentence, which seeds its samples; by default 0, 1, 2...
    Runs without dropout. Padding and start are never generated. Processes that share a model, its experts or its matrices,
    must all call it, with the same source.
    """
    if source.dim() != 2 or 0 in source.shape:
        raise InputError(
            f"the source has shape {list(source.shape)}", fix="give int64 ids of shape [batch, length], at least 1 x 1"
        )
    if source.is_meta or next(model.parameters()).is_meta:
        raise InputError(
            "the model or its source is on the meta device, where there are no values",
            fix="call model.materialize(device) first, or load its weights; and make the source there",
        )
    lengths = (source != PAD).sum(dim=1).tolist()
    if 0 in lengths:
        raise InputError(
            f"row {lengths.index(0)} of the source is only padding", fix="give each sentence at least its end token"
        )
    group = group_in_step(model)
    if group is not None:
        _check_sharing(source, config, group)
    with in_mode(model, training=False):
        limits = [config.max_length(length) for length in lengths]
        runtime = runtime_of(model)
        if config.method == "beam" and group is None:
            steps = runtime.beam_steps(model, source, beam=config.width, max_length=max(limits))
            if steps is not None:
                return static_beam_search(steps, limits, **_beam_options(config))
        reader = runtime.reader(model, source, width=config.width, max_length=max(limits))
        if group is not None:
            reader.top = _agreed(reader.top, group)
        limits = [min(limit, reader.max_length) for limit in limits]
        return _search(reader, limits, config, range(len(source)) if indices is None else indices)


def _check_sharing(source: Tensor, config: SearchConfig, group: Peers) -> None:
    """Raise unless all processes that share the model search for the same, which they must do step by step together."""
    if config.method == "sample":
        raise InputError(
            "samples cannot be drawn while several processes share the model", fix="use beam search or greedy search"
        )
    weights = torch.arange(1, source.numel() + 1, device=source.device).view_as(source)
    own = torch.tensor([*source.shape, int((source * weights).sum())], device=group.device)
    if not (gather(own, group) == own).all():
        raise InputError("the processes that share the model have different sources", fix="give all of them the same source")


def _agreed(top: Top, group: Peers) -> Top:
    """`top` as the first process finds it: rounding may differ between processes, and each must take the same steps."""

    def found(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
        best, indices = top(values, count)
        return from_first(best, group), from_first(indices, group)

    return found


def _search(reader: Reads, limits: list[int], config: SearchConfig, indices: Sequence[int]) -> list[list[Hypothesis]]:
    if config.method == "greedy":
        return greedy(reader, limits)
    if config.method == "beam":
        return beam_search(reader, limits, **_beam_options(config))
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


def _beam_options(config: SearchConfig) -> dict[str, Any]:
    penalty = 1.0 if config.length_penalty is None else config.length_penalty
    return {"beam": config.width, "length_penalty": penalty, "n_best": config.n_best}


def greedy(reader: Reads, limits: list[int]) -> list[list[Hypothesis]]:
    """Choose the most probable token at each step."""
    return extend_hypotheses(reader, limits, 1, lambda log_probabilities, rows, step: reader.top(log_probabilities[:, 0], 1)[1])


def sample(
    reader: Reads,
    limits: list[int],
    *,
    samples: int,
    indices: Sequence[int],
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> list[list[Hypothesis]]:
    """`samples` independent samples of each sentence, in the order drawn."""
    numbers = uniforms(seed, indices, samples, max(limits)).to(reader.first.device)

    def choose(log_probabilities: Tensor, rows: Tensor, step: int) -> Tensor:
        return draw(log_probabilities, numbers[rows, :, step], temperature=temperature, top_k=top_k, top_p=top_p)

    return extend_hypotheses(reader, limits, samples, choose)


def extend_hypotheses(reader: Reads, limits: list[int], width: int, choose: Choose) -> list[list[Hypothesis]]:
    """Extend `width` independent hypotheses of each sentence token by token until all have ended."""
    found: list[list[Hypothesis]] = [[] for _ in limits]
    tokens, device = reader.first, reader.first.device
    rows, longest = torch.arange(len(limits), device=device), torch.tensor(limits, device=device)
    written = torch.empty(len(limits), width, max(limits), dtype=torch.int64, device=device)
    totals = torch.zeros(len(limits), width, dtype=torch.float64, device=device)
    open_ = torch.ones(len(limits), width, dtype=torch.bool, device=device)
    reader.branch(torch.zeros_like(tokens))
    for step in range(max(limits)):
        log_probabilities = reader.read(tokens).expand(-1, width, -1)
        chosen = choose(log_probabilities, rows, step)
        totals += log_probabilities.gather(2, chosen[..., None])[..., 0].where(open_, 0.0)
        # A finished hypothesis is padded with end tokens until the others of its sentence have finished.
        tokens = chosen.where(open_, EOS)
        written[:, :, step] = tokens
        open_ = open_ & (tokens != EOS)
        over = ~open_.any(dim=1) | (longest == step + 1)
        if over.any():
            for row, sentence, log_probability in zip(
                rows[over].tolist(), written[over, :, : step + 1].tolist(), totals[over].tolist(), strict=True
            ):
                found[row] = [_hypothesis(*each) for each in zip(sentence, log_probability, strict=True)]
            if over.all():
                break
            kept = without_gaps(~over)
            reader.keep(kept)
            rows, longest, written, totals, open_, tokens = (
                each[kept] for each in (rows, longest, written, totals, open_, tokens)
            )
        if step == 0 and width > 1:
            reader.branch(torch.zeros_like(tokens))
    return found


def _hypothesis(tokens: list[int], log_probability: float) -> Hypothesis:
    ended = EOS in tokens
    return Hypothesis(tokens[: tokens.index(EOS)] if ended else tokens, log_probability, log_probability, ended)
