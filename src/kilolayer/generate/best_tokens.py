"""The most probable tokens of each hypothesis: all that a beam search needs of a vocabulary's scores.

On a GPU one pass over the logits finds the sum of their powers and the maximum of each block; the best tokens lie in the blocks
with the largest maxima. No log-probability is computed for any other token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kilolayer.generate.reader import BOS, PAD, log_probabilities
from kilolayer.generate.top import top
from kilolayer.operators import kernels

SMALLEST_VOCABULARY, LARGEST_VOCABULARY = 4096, 1 << 18
MOST_TOKENS = 64


def best_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities, best first, and tokens: [rows, hypotheses, vocabulary] to two times [rows, hypotheses, count].

    As `reader.log_probabilities`: padding and start are left out, but keep their share of the sum.
    """
    if not serves(logits, count):
        found, tokens = top(log_probabilities(logits).flatten(0, 1), count)
        return found.unflatten(0, logits.shape[:2]), tokens.unflatten(0, logits.shape[:2])
    from kilolayer.generate.best_tokens_kernel import pick

    found = logits.new_empty(*logits.shape[:2], count, dtype=torch.float32)
    tokens = torch.empty_like(found, dtype=torch.int64)
    pick(logits.flatten(0, 1).contiguous(), found.flatten(0, 1), tokens.flatten(0, 1), (PAD, BOS))
    return found, tokens


def serves(logits: Tensor, count: int) -> bool:
    """Whether the kernels can find so many tokens."""
    known = logits.dtype in (torch.bfloat16, torch.float16, torch.float32)
    fits = SMALLEST_VOCABULARY <= logits.shape[-1] <= LARGEST_VOCABULARY and count <= MOST_TOKENS
    return known and fits and kernels.run_on(logits.device, "best_tokens")
