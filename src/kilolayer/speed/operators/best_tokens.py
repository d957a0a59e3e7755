"""The most probable tokens of each hypothesis, which is all that a beam search needs from the logits.

On a GPU, one pass over the logits computes the sum of their exponentials and the maximum of each block; the best tokens are in
the blocks with the largest maxima. Log-probabilities are computed for these tokens only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kilolayer.speed.operators import kernels
from kilolayer.speed.operators.top import top

SMALLEST_VOCABULARY, LARGEST_VOCABULARY = 4096, 1 << 18
MOST_TOKENS = 64


def best_tokens(logits: Tensor, count: int, barred: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The best log-probabilities and their tokens, best first: [rows, hypotheses, vocabulary] to two [rows, hypotheses, count].

    The two `barred` tokens are never returned, but count in the normalization.
    """
    if not can_pick_best_tokens(logits, count):
        precise = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
        precise[:, barred[0]] = precise[:, barred[1]] = float("-inf")
        found, tokens = top(precise, count)
        return found.unflatten(0, logits.shape[:2]), tokens.unflatten(0, logits.shape[:2])
    from kilolayer.speed.operators.best_tokens_kernel import pick

    found = logits.new_empty(*logits.shape[:2], count, dtype=torch.float32)
    tokens = torch.empty_like(found, dtype=torch.int64)
    pick(logits.flatten(0, 1).contiguous(), found.flatten(0, 1), tokens.flatten(0, 1), barred)
    return found, tokens


def can_pick_best_tokens(logits: Tensor, count: int) -> bool:
    """Whether the kernels support these logits and this many tokens."""
    known = logits.dtype in (torch.bfloat16, torch.float16, torch.float32)
    fits = SMALLEST_VOCABULARY <= logits.shape[-1] <= LARGEST_VOCABULARY and count <= MOST_TOKENS
    return known and fits and kernels.runs_on(logits.device, "best_tokens")
