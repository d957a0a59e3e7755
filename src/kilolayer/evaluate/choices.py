"""Likelihoods of continuations given their contexts, by which multiple-choice questions are scored.

The rules are those of lm-eval:

- White space at the end of a context belongs to the continuation. The context and the whole text are encoded; the continuation
  is what remains of the whole after as many tokens as the context has. If nothing remains, because a token spans the boundary,
  the continuation is encoded by itself.
- An empty context is replaced by the end token, which precedes every document.
- The model reads at most `length` tokens. What does not fit is cut from the left of the context. A continuation that is itself
  longer is read in windows: the first begins with the last token of the context, and each scores what the one before did not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np
import torch

from kilolayer.data.tokenizer import END
from kilolayer.data.vocabulary import TextVocabulary
from kilolayer.evaluate.shared_prefix import Batch, Window, batches, group_by_prefix, read
from kilolayer.layers.modules import in_mode
from kilolayer.models.decoder import Decoder
from kilolayer.moe.shard import refuse_part
from kilolayer.runtime.runtime import runtime_of

AT_ONCE = 8192
"""Number of continuations that are encoded, sorted and scored together."""
TOKENS_AT_ONCE = {"cpu": 512, "cuda": 32_768}
"""Maximum number of tokens in a batch, by device."""
SCORES_AT_ONCE = 1 << 25
"""Maximum number of logits at once, positions times vocabulary: 128 MB in fp32."""

Pair = tuple[np.ndarray, np.ndarray]
"""The tokens of a context, at least one, and of a continuation: int64 [n] each."""


@dataclass(frozen=True)
class Likelihood:
    """The likelihood of a continuation: ln p(continuation | context), and whether each of its tokens is the most probable one.

    tokens, bytes: its length.
    cut: whether the beginning of its context was not read.
    """

    log_likelihood: float
    greedy: bool
    tokens: int
    bytes: int
    cut: bool


def score_choices(
    model: Decoder, vocabulary: TextVocabulary, choices: Iterable[tuple[str, str]], length: int
) -> list[Likelihood]:
    """The likelihood of each continuation given its context, both as text. length: the model's context length in tokens.

    A prefix that several choices share is read once, so the choices of one question cost little more than their continuations.
    """
    encode = lru_cache(maxsize=16)(vocabulary.encode)
    source, found = iter(choices), []
    with in_mode(model, training=False):
        form = runtime_of(model).decoding_form(model)
    while some := list(islice(source, AT_ONCE)):
        pairs = [encode_pair(encode, context, continuation) for context, continuation in some]
        scores = score_tokens(form, pairs, length)
        for (context, tokens), (_, text), (value, greedy) in zip(pairs, some, scores, strict=True):
            cut = len(context) + len(tokens) > length + 1
            found.append(Likelihood(value, greedy, len(tokens), len(text.encode()), cut))
    return found


def encode_pair(encode: Callable[[bytes], np.ndarray], context: str, continuation: str) -> Pair:
    """The tokens of a context and its continuation."""
    before = context.rstrip()
    continuation = context[len(before) :] + continuation
    if not before:
        return np.array([END]), encode(continuation.encode())
    tokens = encode(before.encode())
    rest = encode((before + continuation).encode())[len(tokens) :]
    return tokens, rest if len(rest) or not continuation else encode(continuation.encode())


@torch.inference_mode()
def score_tokens(model: Decoder, pairs: Sequence[Pair], length: int) -> list[tuple[float, bool]]:
    """The log-likelihood of each continuation, summed in fp64, and whether it is the greedy one; for no tokens, 0 and True."""
    refuse_part(model)
    parts = [(number, window) for number, pair in enumerate(pairs) for window in _windows(*pair, length)]
    owners, windows = np.array([number for number, _ in parts], np.int64), [window for _, window in parts]
    totals, greedy = np.zeros(len(pairs)), np.ones(len(pairs), bool)
    with in_mode(model, training=False):
        form = runtime_of(model).decoding_form(model)
        for batch in batches(windows, group_by_prefix(windows), TOKENS_AT_ONCE[next(model.parameters()).device.type]):
            values, best = _predictions(form, batch)
            np.add.at(totals, owners[batch.windows], values)
            np.logical_and.at(greedy, owners[batch.windows], best)
    return list(zip(totals.tolist(), greedy.tolist(), strict=True))


def _windows(context: np.ndarray, continuation: np.ndarray, length: int) -> Iterator[Window]:
    """The windows that the model reads of a pair: one, unless the continuation exceeds the context length."""
    whole = np.concatenate([context, continuation])
    if 0 < len(continuation) <= length:
        yield Window(whole[-(length + 1) :], len(continuation))
        return
    for begin in range(len(context), len(whole), length):
        end = min(begin + length, len(whole))
        yield Window(whole[max(0, end - length - 1) : end], end - begin)


def _predictions(model: Decoder, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """The log-probability of each target of a batch, fp64 [predictions], and whether it is the most probable token."""
    states = read(model, batch).flatten(0, 1)
    positions, where = np.unique(batch.at, return_inverse=True)  # several branches may be predicted from one position
    order = np.argsort(where, kind="stable")
    step = max(1, SCORES_AT_ONCE // len(model.embedding.weight))
    values, best = np.empty(len(order)), np.empty(len(order), bool)
    for first in range(0, len(positions), step):
        mine = order[slice(*np.searchsorted(where[order], [first, first + step]))]
        chosen = states[torch.from_numpy(positions[first : first + step]).to(states.device)]
        scores = model.scores(chosen[None])[0]
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        rows, targets = (torch.from_numpy(each).to(states.device) for each in (where[mine] - first, batch.targets[mine]))
        highest, tokens = scores.max(dim=-1)
        found = scores[rows, targets]
        sums = scores.sub_(highest[:, None]).exp_().sum(dim=-1).log_().add_(highest)
        values[mine] = (found - sums[rows]).double().cpu().numpy()
        best[mine] = (tokens[rows] == targets).cpu().numpy()
    return values, best
