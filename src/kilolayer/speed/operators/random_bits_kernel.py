"""The random generator of random_bits.py for use inside Triton kernels, elementwise over a block of positions."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from kilolayer.speed.operators import random_bits

ROUNDS: tl.constexpr = tl.constexpr(random_bits.ROUNDS)
MULTIPLIER: tl.constexpr = tl.constexpr(random_bits.MULTIPLIER)
WEYL: tl.constexpr = tl.constexpr(random_bits.WEYL)


@triton.jit
def is_kept(seed_at, position, threshold):
    """Whether the element at each position, int64, is kept: its word is not below the threshold."""
    return random_words(seed_at, position) >= threshold.to(tl.uint32)


@triton.jit
def random_words(seed_at, position):
    """uint32 of the shape of the positions, int64, from the seed at that address, also int64."""
    seed = tl.load(seed_at)
    key, x = seed.to(tl.uint32), position.to(tl.uint32)
    y = (seed >> 32).to(tl.uint32) ^ (position >> 32).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        x, y = tl.umulhi(x, MULTIPLIER) ^ key ^ y, tl.mul(x, MULTIPLIER, sanitize_overflow=False)
        key = tl.add(key, WEYL, sanitize_overflow=False)
    return x
