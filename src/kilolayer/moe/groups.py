"""Rows that lie sorted by group, and what each group does to its own rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Groups(NamedTuple):
    """Group e holds the rows ends[e - 1] to ends[e], possibly none; rows behind the last group belong to none.

    ends: int32 [groups]; of_row: int64 [rows], the group of each row; rows behind the last group name any.
    """

    ends: Tensor
    of_row: Tensor


def multiply_groups(rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """x W_e^T for the rows x of group e: rows [rows, inputs], weight [groups, outputs, inputs]. 0 behind the last group."""
    ends = groups.ends.tolist()
    starts = [0, *ends[:-1]]
    products = [rows[start:end] @ matrix.mT for start, end, matrix in zip(starts, ends, weight, strict=True)]
    return torch.cat([*products, rows.new_zeros(len(rows) - ends[-1], weight.shape[1])])


def spread(table: Tensor, groups: Groups) -> Tensor:
    """The entry of each row's group: [groups, width] to [rows, width]."""
    return table[groups.of_row]
