"""A part of a validation set, taken from all over it: files are often sorted by class, length or source."""

from __future__ import annotations

import numpy as np


def members_all_over(count: int, most: int | None = None) -> np.ndarray:
    """The indices of `count` members of a set, or of `most` of them at equal distances: int64."""
    members = np.arange(count)
    return members if most is None or most >= count else members[:most] * count // most
