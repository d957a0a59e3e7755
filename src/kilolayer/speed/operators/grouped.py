"""Grouped matrix products: each group of rows has its own matrix; one launch, without reading group sizes from the device.

Rows are sorted by group: group e has the rows ends[e - 1] to ends[e] - 1, possibly none; rows after the last group belong to
none. The products use `torch.nn.functional.grouped_mm` where it does not wait for the device, and otherwise a batched product
over blocks of equal size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.moe.groups import Groups
from kilolayer.speed.operators import kernels

WIDTH = 16  # bytes that the kernels load at once; rows and matrices must start at multiples of it
MOST_GROUPS = 1023  # per launch


def multiply_groups(rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """x W_e^T for the rows x of group e, 0 after the last group; rows [rows, inputs], weight [groups, outputs, inputs]."""
    return cut(grouped_product(rows, weight, groups.ends, True), groups.ends)


def spread(table: Tensor, groups: Groups) -> Tensor:
    """Look up the entry of each row's group: [groups, width] to [rows, width]."""
    return _Spread.apply(table, groups.ends, groups.of_row)


def cut(rows: Tensor, ends: Tensor) -> Tensor:
    """Set rows after the last group to 0; not by multiplication, because NaN times 0 is NaN."""
    inside = torch.arange(rows.shape[0], device=rows.device) < ends[-1]
    return torch.where(inside[:, None], rows, 0)


class _Spread(torch.autograd.Function):
    """A look-up whose backward sums by group: the rows of a group are adjacent, so nothing has to be scattered."""

    @staticmethod
    def forward(table: Tensor, ends: Tensor, of_row: Tensor) -> Tensor:
        return table[of_row]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return group_sums(*grad_outputs, *ctx.saved_tensors), None, None


@torch.library.custom_op("kilolayer::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """x W_e^T (transposed) or x W_e for the rows x of group e; rows after the last group are undefined."""
    matrices, rows = weight.mT if transposed else weight, rows.contiguous()
    if _is_served(ends, rows, weight):
        return F.grouped_mm(rows, matrices, offs=ends)
    blocks = _Blocks(len(rows), ends)
    return blocks.undo(blocks.fill(rows) @ matrices[blocks.group])


@torch.library.custom_op("kilolayer::grouped_outer", mutates_args=())
def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """The sum of l r^T over the rows of each group: [rows, m] and [rows, n] to [groups, m, n]."""
    left, right = left.contiguous(), right.contiguous()
    if _is_served(ends, left, right):
        return F.grouped_mm(left.mT, right, offs=ends)
    blocks = _Blocks(len(left), ends)
    products = blocks.fill(left).mT @ blocks.fill(right)
    return products.new_zeros(len(ends), *products.shape[1:]).index_put_((blocks.group,), products, accumulate=True)


@torch.library.custom_op("kilolayer::group_sums", mutates_args=())
def group_sums(rows: Tensor, ends: Tensor, of_row: Tensor) -> Tensor:
    """The sum of the rows of each group, in fp32 or higher precision: [rows, width] to [groups, width]."""
    rows = rows.contiguous()
    ones = rows.new_ones(len(rows), WIDTH // rows.element_size())
    if rows.is_cuda and _is_served(ends, ones, rows):
        return F.grouped_mm(ones.mT, rows, offs=ends)[:, 0].contiguous()
    if rows.is_cuda and rows.dtype != torch.float64 and kernels.runs_on(rows.device, "group_sums"):
        return _sums_of_parts(rows, ends, of_row)
    starts = F.pad(ends.long(), (1, 0))
    precise = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return torch.segment_reduce(precise, "sum", offsets=starts, axis=0, initial=0, unsafe=True).to(rows.dtype)


@grouped_product.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1 if transposed else 2])


@grouped_outer.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


@group_sums.register_fake
def _(rows: Tensor, ends: Tensor, of_row: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, ends, ctx.transposed = inputs
    ctx.save_for_backward(rows, weight, ends)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, ends = ctx.saved_tensors
    of_rows = of_weight = None
    if ctx.needs_input_grad[0]:
        of_rows = cut(grouped_product(gradient, weight, ends, not ctx.transposed), ends)
    if ctx.needs_input_grad[1]:
        of_weight = grouped_outer(*((gradient, rows) if ctx.transposed else (rows, gradient)), ends)
    return of_rows, of_weight, None, None


grouped_product.register_autograd(_backward, setup_context=_setup_context)


def _sums_of_parts(rows: Tensor, ends: Tensor, of_row: Tensor) -> Tensor:
    from kilolayer.speed.operators.group_sums_kernel import add_up_segments, empty_sums, sum_segments

    total = rows.new_empty(len(ends), rows.shape[1])
    sums = empty_sums([total])
    sum_segments(rows, ends, of_row, sums)
    add_up_segments(sums, ends, [total])
    return total


def _is_served(ends: Tensor, *operands: Tensor) -> bool:
    """Whether grouped_mm supports these groups without reading their sizes back from the device."""
    dtype = operands[0].dtype
    if operands[0].is_cuda:
        served = dtype == torch.bfloat16 and torch.cuda.get_device_capability(operands[0].device)[0] in (9, 10)
    else:
        served = dtype in (torch.float32, torch.bfloat16)
    return served and len(operands[0]) > 0 and len(ends) <= MOST_GROUPS and all(map(_is_aligned, operands))


def _is_aligned(operand: Tensor) -> bool:
    sizes = operand.shape[1:] if operand.dim() == 3 else operand.shape[-1:]
    starts = all(size * operand.element_size() % WIDTH == 0 for size in sizes)
    return starts and operand.is_contiguous() and operand.data_ptr() % WIDTH == 0


class _Blocks:
    """Rows in blocks of equal size, each with rows of one group, so that one batched product computes all groups.

    Blocks have ceil(rows / groups) rows. At most `groups` blocks are full, and each group has at most one that is not, so
    2 * groups blocks are enough for any distribution of rows; they have at most about twice the rows.
    """

    def __init__(self, rows: int, ends: Tensor) -> None:
        groups, device = len(ends), ends.device
        self.size = max(1, -(-rows // groups))
        count = min(2 * groups, rows)
        starts = F.pad(ends, (1, 0))
        self.ends, self.starts = ends.long(), starts[:-1].long()
        block_ends = -(-(self.ends - self.starts) // self.size)
        block_ends = block_ends.cumsum(0)
        self.first = F.pad(block_ends, (1, 0))[:-1]
        self.group = torch.searchsorted(block_ends, torch.arange(count, device=device), right=True).clamp(max=groups - 1)
        self.rows = rows

    def fill(self, rows: Tensor) -> Tensor:
        """[rows, width] to [blocks, size, width], filled up with 0."""
        block = torch.arange(len(self.group), device=rows.device) - self.first[self.group]
        offset = torch.arange(self.size, device=rows.device)
        source = self.starts[self.group, None] + block[:, None] * self.size + offset
        inside = source < self.ends[self.group, None]
        return torch.where(inside[..., None], rows[source.clamp(max=self.rows - 1)], 0)

    def undo(self, blocks: Tensor) -> Tensor:
        """[blocks, size, width] back to [rows, width]."""
        row = torch.arange(self.rows, device=blocks.device)
        group = torch.searchsorted(self.ends, row, right=True).clamp(max=len(self.ends) - 1)
        offset = self.first[group] * self.size + row - self.starts[group]
        return blocks.flatten(0, 1)[offset.clamp(max=blocks.shape[0] * self.size - 1)]
