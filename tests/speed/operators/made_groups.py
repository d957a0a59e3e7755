"""Rows that fall into groups in many ways."""

from __future__ import annotations

import torch

from kilolayer.moe.groups import Groups

# Rows of each group, and how many belong to none.
SIZES = [
    ([3, 0, 4], 0),
    ([3, 0, 4], 2),
    ([0, 0, 7], 1),
    ([7, 0, 0], 0),
    ([0, 0, 0], 3),
    ([0, 0], 0),
    ([1], 0),
    ([1, 1, 1, 1, 1], 0),
    ([0, 13], 1),
]


def make(sizes: list[int], rest: int) -> Groups:
    """Groups of these sizes, and `rest` rows behind the last one."""
    ends = torch.tensor(sizes).cumsum(0)
    of_row = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return Groups(ends.int(), torch.cat([of_row, torch.full((rest,), len(sizes) - 1)]))
