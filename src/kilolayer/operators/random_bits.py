"""Dropout from a counter-based generator: a seed and the position of an element decide whether it is kept.

So forward, backward and recomputation draw the same without storing a mask, and a kernel draws what the formulas here draw.
The generator is Philox2x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): the fewest that
pass BigCrush there. Its key is the lower half of the seed, its counter the position, whose upper half is joined with the seed's
by an exclusive or.
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
    """Which elements of a tensor of this shape are kept where each is dropped with probability p: bool.

    seed: int64 of one element, on the device where the mask is drawn. The position of an element is its row-major index.
    """
    position = torch.arange(math.prod(shape), device=seed.device)
    return (random_words(seed, position) >= threshold(p)).view(shape)


def dropout(x: Tensor, seed: Tensor | None, p: float) -> Tensor:
    """x / (1 - p) where it is kept and 0 elsewhere; x itself without a seed. As in nn.Dropout, what is not finite stays so."""
    if seed is None or p == 0:
        return x
    return x * kept_scale(p) * keep_mask(seed, x.shape, p)


class Draw(NamedTuple):
    """What a kernel needs to draw: the seed or, where nothing is dropped, none; the smallest word kept; what is kept, times."""

    seed: Tensor | None
    threshold: int
    scale: float


def draw_of(seed: Tensor | None, p: float) -> Draw:
    """Dropout with probability p, none without a seed."""
    return Draw(None, 0, 1.0) if seed is None or p == 0 else Draw(seed, threshold(p), kept_scale(p))


def random_words(seed: Tensor, position: Tensor) -> Tensor:
    """The generator's first word at each position: int64 from 0 to 2**32 - 1, of the shape of the positions, int64 too."""
    seed = seed.view(())
    key, x, y = seed & LOW, position & LOW, ((seed ^ position) >> 32) & LOW
    for _ in range(ROUNDS):
        # Beside the multiplier less 2**32, the product fits into 63 bits; its upper half then lacks x.
        product = x * (MULTIPLIER - (1 << 32))
        x, y = ((product >> 32) + x) ^ key ^ y, product & LOW
        key = (key + WEYL) & LOW
    return x


def threshold(p: float) -> int:
    """The smallest word of an element that is kept."""
    if not 0 <= p < 1:
        raise OptionError(f"dropout is {p}", fix="give a probability of at least 0 and below 1")
    return min(round(p * 2**32), LOW)


def kept_scale(p: float) -> float:
    """What elements that are kept are multiplied by, so that their mean stays."""
    return 1 / (1 - p)
