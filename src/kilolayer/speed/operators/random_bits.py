"""Dropout from a counter-based random generator: the seed and the position of an element determine whether it is kept.

Forward, backward and recomputation therefore draw the same numbers without storing a mask, and the kernels draw the same ones
as the formulas here. The generator is Philox2x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011), the fewest that pass BigCrush there. Its key is the lower half of the seed; its counter is the position, with its upper
half XORed with the upper half of the seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kilolayer.errors import OptionError

ROUNDS = 7
MULTIPLIER = 0xD256D193
WEYL = 0x9E3779B9
LOW = 0xFFFFFFFF


def keep_mask(seed: Tensor, shape: Sequence[int], p: float) -> Tensor:
    """Return a bool mask of this shape: True for the elements that dropout with probability p keeps.

    seed: int64 [1], on the device of the mask. The position of an element is its row-major index.
    """
    position = torch.arange(math.prod(shape), device=seed.device)
    return (random_words(seed, position) >= threshold(p)).view(shape)


def dropout(x: Tensor, seed: Tensor | None, p: float) -> Tensor:
    """Apply dropout: x / (1 - p) where kept, else 0; x itself without a seed. As in nn.Dropout, inf and NaN do not become 0."""
    if seed is None or p == 0:
        return x
    return x * kept_scale(p) * keep_mask(seed, x.shape, p)


class Draw(NamedTuple):
    """Dropout as kernels take it.

    seed: None for no dropout. threshold: the smallest random word that keeps an element. scale: 1 / (1 - p).
    """

    seed: Tensor | None
    threshold: int
    scale: float


def draw_of(seed: Tensor | None, p: float) -> Draw:
    """Return the `Draw` of dropout with probability p; without a seed, that of no dropout."""
    return Draw(None, 0, 1.0) if seed is None or p == 0 else Draw(seed, threshold(p), kept_scale(p))


def random_words(seed: Tensor, position: Tensor) -> Tensor:
    """Return the generator's first word at each position: int64 in [0, 2**32), of the shape of `position`, also int64."""
    seed = seed.view(())
    key, x, y = seed & LOW, position & LOW, ((seed ^ position) >> 32) & LOW
    for _ in range(ROUNDS):
        # With 2**32 subtracted from the multiplier, the product fits into 63 bits; its upper half then lacks x.
        product = x * (MULTIPLIER - (1 << 32))
        x, y = ((product >> 32) + x) ^ key ^ y, product & LOW
        key = (key + WEYL) & LOW
    return x


def threshold(p: float) -> int:
    """The smallest random word for which dropout with probability p keeps an element."""
    if not 0 <= p < 1:
        raise OptionError(f"dropout is {p}", fix="give a probability of at least 0 and below 1")
    return min(round(p * 2**32), LOW)


def kept_scale(p: float) -> float:
    """The factor for elements that dropout keeps, which preserves the mean."""
    return 1 / (1 - p)
