"""Random numbers that depend on a seed, an image and an epoch alone: not on the batch, the device or what was drawn before.

Each number is a hash of these (the finalizer of SplitMix64, Steele et al. 2014), computed where the images are.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

GOLDEN, SPREAD, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
TABLE = 4096


def uniform(seed: int, keys: Tensor, count: int, first: int = 0) -> Tensor:
    """The draws number `first` to `first + count` of images: fp32 [rows, count], in [0, 1), with 24 bits.

    keys: int64 [rows, 2], image and epoch.
    """
    numbers = torch.arange(first, first + count, device=keys.device)
    start = _mixed(keys[:, :1] * _signed(GOLDEN) + _scalar(seed))
    hashed = _mixed(_mixed(start + keys[:, 1:] * _signed(SPREAD)) + numbers * _signed(GOLDEN))
    return _shifted(hashed, 40).float() * 2.0**-24


def beta_quantiles(alpha: float) -> Tensor:
    """Quantiles of Beta(alpha, alpha) at the middles of 4,096 equal steps: fp32 [4096]; a table to draw from.

    With x = t^(1 / alpha) the density of t, (1 - x)^(alpha - 1), is finite for x up to a half; the other half is symmetric.
    """
    t = np.linspace(0, 0.5**alpha, 20001)
    density = (1 - t ** (1 / alpha)) ** (alpha - 1)
    below = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    steps = (np.arange(TABLE // 2) + 0.5) / TABLE
    lower = np.interp(steps, below / below[-1] / 2, t) ** (1 / alpha)
    return torch.from_numpy(np.concatenate([lower, 1 - lower[::-1]])).float()


def beta(draws: Tensor, quantiles: Tensor) -> Tensor:
    """Numbers with the distribution of a table of quantiles, from uniform ones of any shape."""
    return quantiles[(draws * TABLE).long()]


def log_uniform(draws: Tensor, least: float, most: float) -> Tensor:
    """Numbers from `least` to `most` whose logarithms are uniform, from uniform draws."""
    return torch.exp(math.log(least) + draws * (math.log(most) - math.log(least)))


def _scalar(seed: int) -> int:
    """A seed as int64, far from that of the next seed."""
    value = (seed * SPREAD + GOLDEN) % 2**64
    for shift, factor in ((30, FIRST), (27, SECOND)):
        value = ((value ^ (value >> shift)) * factor) % 2**64
    return _signed(value ^ (value >> 31))


def _mixed(value: Tensor) -> Tensor:
    value = (value ^ _shifted(value, 30)) * _signed(FIRST)
    value = (value ^ _shifted(value, 27)) * _signed(SECOND)
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, bits: int) -> Tensor:
    """int64, shifted to the right as if it had no sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
