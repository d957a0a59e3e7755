"""Continue texts, also beyond the model's context length.

A model reads at most `context` tokens. Of a longer text it reads the last ones. When the tokens read and written fill the
context, the model rereads the last half of them and continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kilolayer.generate.config import SearchConfig
from kilolayer.generate.hypothesis import Hypothesis
from kilolayer.generate.sample import draw, uniforms
from kilolayer.generate.search import Choose, extend_hypotheses
from kilolayer.layers.modules import in_mode
from kilolayer.models.decoder import Decoder
from kilolayer.moe.shard import refuse_part
from kilolayer.runtime.reader import PAD, Reads, Top
from kilolayer.runtime.runtime import runtime_of

AT_ONCE = 64  # continuations that are decoded in parallel


@dataclass
class _Line:
    """One continuation of one text, and the preceding tokens that the model reads next."""

    text: int
    sample: int
    window: list[int]
    written: list[int] = field(default_factory=list)
    log_probability: float = 0.0
    ended: bool = False


@torch.inference_mode()
def continue_texts(
    model: Decoder,
    texts: Sequence[Sequence[int]],
    config: SearchConfig,
    *,
    context: int,
    indices: Sequence[int] | None = None,
    on_token: Callable[[int], None] | None = None,
) -> list[list[Hypothesis]]:
    """`config.n_best` continuations of each text, greedy or sampled, until the model ends them or they reach the maximum
    length.

    texts: token ids, at least one each.
    indices: the number of each text, which seeds its samples.
    on_token: called with each token as it is generated, if there is only one continuation.
    """
    samples = range(config.n_best)
    lines = [_Line(text, sample, list(tokens[-context:])) for text, tokens in enumerate(texts) for sample in samples]
    numbers = uniforms(config.seed or 0, range(len(texts)) if indices is None else indices, config.n_best, config.max_length(0))
    refuse_part(model)
    with in_mode(model, training=False):
        form = runtime_of(model).decoding_form(model)
        _continue_lines(form, lines, config, numbers.to(next(model.parameters()).device), context, on_token)
    found: list[list[Hypothesis]] = [[] for _ in texts]
    for line in lines:
        found[line.text].append(Hypothesis(line.written, line.log_probability, line.log_probability, line.ended))
    return found


def _continue_lines(
    model: Decoder,
    lines: list[_Line],
    config: SearchConfig,
    numbers: Tensor,
    context: int,
    on_token: Callable[[int], None] | None,
) -> None:
    """Decode in rounds, each until a line's context is full."""
    most = config.max_length(0)
    while open_ := [line for line in lines if not line.ended and len(line.written) < most]:
        for batch in _batches(open_, padded=model.config.max_length is None):
            limits = [min(most - len(line.written), context - len(line.window) + 1) for line in batch]
            reader = _reader(model, batch, max(limits))
            _extend(reader, batch, limits, _chooser(reader.top, batch, config, numbers, on_token))
        for line in open_:
            line.window = line.window[-max(1, context // 2) :]


def _batches(lines: list[_Line], *, padded: bool) -> Iterator[list[_Line]]:
    """Lines to decode together. Learned positions do not allow padding, so all lines of a batch then have the same length."""
    rest = sorted(lines, key=lambda line: len(line.window))
    while rest:
        count = min(len(rest), AT_ONCE)
        if not padded:
            count = sum(len(line.window) == len(rest[0].window) for line in rest[:count])
        yield rest[:count]
        rest = rest[count:]


def _reader(model: Decoder, lines: list[_Line], max_length: int) -> Reads:
    width = max(len(line.window) for line in lines)
    source = torch.tensor([line.window + [PAD] * (width - len(line.window)) for line in lines])
    source = source.to(next(model.parameters()).device)
    return runtime_of(model).reader(model, source, width=1, max_length=max_length)


def _extend(reader: Reads, lines: list[_Line], limits: list[int], choose: Choose) -> None:
    """Continue each line up to its limit."""
    for line, (found,) in zip(lines, extend_hypotheses(reader, limits, 1, choose), strict=True):
        line.written += found.tokens
        line.window += found.tokens
        line.log_probability += found.log_probability
        line.ended = found.ended


def _chooser(
    top: Top, lines: list[_Line], config: SearchConfig, numbers: Tensor, on_token: Callable[[int], None] | None
) -> Choose:
    """The function that chooses the next tokens. The number of a draw identifies the sample and the token within it."""
    texts, samples, done = torch.tensor(
        [[line.text, line.sample, len(line.written)] for line in lines], device=numbers.device
    ).T

    def choose(log_probabilities: Tensor, rows: Tensor, step: int) -> Tensor:
        if config.method == "greedy":
            chosen = top(log_probabilities[:, 0], 1)[1]
        else:
            drawn = numbers[texts[rows], samples[rows], done[rows] + step]
            temperature = 1.0 if config.temperature is None else config.temperature
            chosen = draw(log_probabilities, drawn[:, None], temperature=temperature, top_k=config.top_k, top_p=config.top_p)
        if on_token is not None:
            on_token(int(chosen[0, 0]))
        return chosen

    return choose
