"""Random sampling of tokens: temperature, then top-k, then top-p.

Each sentence has its own stream of random numbers, seeded by the seed and the sentence's index, so the rest of the batch does
not affect it. A token is drawn by inversion: the first whose cumulative probability exceeds a uniform random number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def uniforms(seed: int, indices: Sequence[int], samples: int, steps: int) -> Tensor:
    """A uniform number in [0, 1) for each draw: fp64 [sentences, samples, steps]."""
    return torch.stack([torch.rand(steps, samples, generator=_generator(seed, i), dtype=torch.float64).T for i in indices])


def draw(log_probabilities: Tensor, uniform: Tensor, *, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """One token from each distribution: log-probabilities [..., vocabulary] and uniform numbers [...] to int64 [...]."""
    below = log_probabilities.double() - log_probabilities.double().amax(dim=-1, keepdim=True)
    probabilities = (below / temperature).softmax(dim=-1)  # the largest is 0, so that no temperature is too small
    if top_k is None and top_p is None:
        return _invert(probabilities, uniform)
    # A stable sort, so that among equal tokens the first is kept, whatever else is in the batch.
    probabilities, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        probabilities = probabilities[..., :top_k]
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    if top_p is not None:
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    return tokens.gather(-1, _invert(probabilities, uniform)[..., None])[..., 0]


def _invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    cumulated = probabilities.cumsum(dim=-1)
    # Scaled by the last sum as rounded, and strictly below it: a token of probability 0 is never chosen.
    reached = torch.minimum(uniform * cumulated[..., -1], torch.nextafter(cumulated[..., -1], uniform.new_zeros(())))
    indices = torch.searchsorted(cumulated, reached[..., None], right=True)[..., 0]
    # Out of range if the probabilities are NaN, which the hypothesis then reports.
    return indices.clamp(max=probabilities.shape[-1] - 1)


def _generator(seed: int, index: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
