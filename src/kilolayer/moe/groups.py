"""Rows sorted by group, and the products of each group's rows with the group's own matrix."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Groups(NamedTuple):
    """Group e consists of the rows ends[e - 1] to ends[e] - 1, possibly none; rows after the last group belong to no group.

    ends: int32 [groups]; of_row: int64 [rows], the group of each row; any valid index for rows after the last group.
    """

    ends: Tensor
    of_row: Tensor


def multiply_groups(rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """x W_e^T for the rows x of group e, and 0 after the last group: [rows, outputs].

    rows: [rows, inputs]; weight: [groups, outputs, inputs].
    """
    ends = groups.ends.tolist()
    starts = [0, *ends[:-1]]
    products = [rows[start:end] @ matrix.mT for start, end, matrix in zip(starts, ends, weight, strict=True)]
    return torch.cat([*products, rows.new_zeros(len(rows) - ends[-1], weight.shape[1])])


def spread(table: Tensor, groups: Groups) -> Tensor:
    """Look up the entry of each row's group: [groups, width] to [rows, width]."""
    return table[groups.of_row]
