"""Multi-tensor optimizer kernels: update, accumulation and norm of the gradients of many tensors in one launch.

Each program processes one chunk of one tensor. Gradients and weights are separate tensors, thousands of them, and are read
through tables of addresses; moments, master weights and accumulated gradients are in flat buffers. A program reads and writes
each number once.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, cast, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from kilolayer.optimizers.base import AdamKernel, MatrixKernel
from kilolayer.optimizers.group import Group

Use = Literal["collect", "update"]
"""The use of gradients: those of one batch, to be accumulated, or those of the whole step."""
CHUNK = 2048
CHUNKS_AT_ONCE = 8
"""Chunks per program of a kernel that only reads, for which one chunk would be too little work."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class UpdateKernel:
    """Launches the kernels for the groups of an optimizer. constants: of each group's update; None if it has another one.

    The addresses of the gradients are passed in tables. While a step is recorded as a CUDA graph, no table can be written;
    `recording` gives the step its own tables and fills them afterwards.
    """

    def __init__(self, groups: Sequence[Group], constants: Sequence[AdamKernel | MatrixKernel | None]) -> None:
        self.groups, self.constants = groups, constants
        self.chunks = [Chunks(group) for group in groups]
        self.tables = self._new_tables()
        self.noted: dict[Use, list[Tensor]] = {}
        self.recorded: list[dict[Use, list[Tensor]]] = []

    def update(self, factors: Sequence[Tensor | None], finite: Tensor) -> None:
        """Update the weights of the groups that have factors, in one launch per group. finite: bool [].

        factors: fp32 [5] for each group: lr, step, root, offset, scale.
        """
        self._note("update", [group.gradients for group in self.groups])
        for index, each in enumerate(factors):
            if each is not None:
                self._update_group(index, each, finite)

    def update_matrices(self, index: int, few: range, factors: Tensor, finite: Tensor) -> None:
        """Update a few weights of a group of matrices, after `update`, by two launches and what `directions` takes.

        few: their indices. factors: fp32 [3]: lr, the number of the update, scale. A weight without a gradient does not change.
        """
        group, chunks, constants = self.groups[index], self.chunks[index], cast("MatrixKernel", self.constants[index])
        gradient = next((each for each in group.gradients if each is not None), None)
        if gradient is None:
            return
        size = group.weights[0].numel()
        own = slice(few.start * triton.cdiv(size, CHUNK), few.stop * triton.cdiv(size, CHUNK))
        tensor_of, start_of, gradients = chunks.tensor_of[own], chunks.start_of[own], self.tables["update"][index]
        inputs = torch.empty(len(few), *group.weights[0].shape, dtype=torch.bfloat16, device=gradient.device)
        _average[(len(tensor_of),)](
            tensor_of,
            start_of,
            chunks.offsets,
            gradients,
            group.buffers["mean"],
            inputs,
            factors,
            finite,
            few.start,
            size,
            constants.momentum,
            GRADIENT=TYPES[gradient.dtype],
            NESTEROV=constants.nesterov,
            SIZE=CHUNK,
            num_warps=8,
        )
        _subtract[(len(tensor_of),)](
            tensor_of,
            start_of,
            chunks.offsets,
            chunks.rates,
            gradients,
            chunks.weights,
            group.buffers.get("masters", factors),
            constants.directions(inputs),
            factors,
            finite,
            few.start,
            size,
            group.decay,
            WEIGHT=TYPES[group.weights[0].dtype],
            HAS_MASTER="masters" in group.buffers,
            SIZE=CHUNK,
            num_warps=8,
        )

    def norms(self) -> list[Tensor]:
        """Return the norm of each group's gradients: fp64 [] each."""
        self._note("update", [group.gradients for group in self.groups])
        return [
            sums_of_squares(group, chunks, table).sum(dtype=torch.float64).sqrt()
            for group, chunks, table in zip(self.groups, self.chunks, self.tables["update"], strict=True)
        ]

    def collect(self) -> None:
        """Add the gradients of the last backward pass to the sums, in one launch per group."""
        self._note("collect", [[weight.grad for weight in group.weights] for group in self.groups])
        for group, chunks, table in zip(self.groups, self.chunks, self.tables["collect"], strict=True):
            add_gradients(group, chunks, table)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context for recording a step, or one batch of it, as a CUDA graph."""
        usual, self.tables = self.tables, self._new_tables()
        self.noted = {}
        try:
            yield
            for use in self.noted:
                self._write(use)
            self.recorded.append(self.tables)
        finally:
            self.tables = usual

    def _update_group(self, index: int, factors: Tensor, finite: Tensor) -> None:
        """Update one group in one launch."""
        group, chunks, constants = self.groups[index], self.chunks[index], cast("AdamKernel", self.constants[index])
        gradient = next((each for each in group.gradients if each is not None), None)
        if gradient is None:
            return
        means, squares = group.buffers["mean"], group.buffers["square"]
        _update[(len(chunks.tensor_of),)](
            chunks.tensor_of,
            chunks.start_of,
            chunks.sizes,
            chunks.offsets,
            chunks.rates,
            self.tables["update"][index],
            chunks.weights,
            means,
            squares,
            group.buffers.get("masters", means),
            factors,
            finite,
            constants.beta1,
            constants.beta2,
            group.decay,
            GRADIENT=TYPES[gradient.dtype],
            WEIGHT=TYPES[group.weights[0].dtype],
            HAS_MASTER="masters" in group.buffers,
            DECOUPLED=constants.decoupled,
            SIZE=CHUNK,
            num_warps=8,
        )

    def _new_tables(self) -> dict[Use, list[Tensor]]:
        return {use: [torch.zeros_like(chunks.weights) for chunks in self.chunks] for use in get_args(Use)}

    def _note(self, use: Use, gradients: list[list[Tensor | None]]) -> None:
        self.noted[use] = [addresses(each) for each in gradients]
        if not torch.cuda.is_current_stream_capturing():
            self._write(use)

    def _write(self, use: Use) -> None:
        for table, noted in zip(self.tables[use], self.noted[use], strict=True):
            table.copy_(noted)


class Chunks:
    """The chunks of a group: the tensor and the start of each."""

    def __init__(self, group: Group) -> None:
        device = group.weights[0].device
        chunks = [(index, start) for index, weight in enumerate(group.weights) for start in range(0, weight.numel(), CHUNK)]
        self.tensor_of, self.start_of = (torch.tensor(column, device=device) for column in zip(*chunks, strict=True))
        self.sizes = torch.tensor([weight.numel() for weight in group.weights], device=device)
        self.offsets = torch.tensor(group.starts, device=device)
        self.rates = torch.tensor(group.rates, dtype=torch.float32, device=device)
        self.weights = addresses(list(group.weights)).to(device)


def addresses(tensors: list[Tensor | None]) -> Tensor:
    """Return the addresses of tensors: int64 [tensors], 0 for None."""
    return torch.tensor([0 if tensor is None else tensor.data_ptr() for tensor in tensors])


def add_gradients(group: Group, chunks: Chunks, gradients: Tensor) -> None:
    """Compute sums <- sums + gradients in one launch. gradients: their addresses, int64 [weights], on the device."""
    gradient = next((weight.grad for weight in group.weights if weight.grad is not None), None)
    if gradient is not None:
        _add_gradients[(len(chunks.tensor_of),)](
            chunks.tensor_of,
            chunks.start_of,
            chunks.sizes,
            chunks.offsets,
            gradients,
            group.buffers["sums"],
            GRADIENT=TYPES[gradient.dtype],
            SIZE=CHUNK,
            num_warps=8,
        )


def sums_of_squares(group: Group, chunks: Chunks, gradients: Tensor) -> Tensor:
    """Return partial sums of the squared gradients, fp32 [programs], in one launch. gradients: as in `add_gradients`."""
    gradient = next((each for each in group.gradients if each is not None), None)
    count = len(chunks.tensor_of)
    sums = torch.zeros(triton.cdiv(count, CHUNKS_AT_ONCE), device=gradients.device)
    if gradient is not None:
        _add_squares[(len(sums),)](
            chunks.tensor_of,
            chunks.start_of,
            chunks.sizes,
            gradients,
            sums,
            count,
            GRADIENT=TYPES[gradient.dtype],
            AT_ONCE=CHUNKS_AT_ONCE,
            SIZE=CHUNK,
            num_warps=4,
        )
    return sums


@triton.jit
def _add_gradients(tensor_of, start_of, sizes, offsets, gradients, sums, GRADIENT: tl.constexpr, SIZE: tl.constexpr):
    index = tl.load(tensor_of + tl.program_id(0))
    address = tl.load(gradients + index)
    if address != 0:
        start = tl.multiple_of(tl.load(start_of + tl.program_id(0)), 64)
        sum_at = sums + tl.multiple_of(tl.load(offsets + index), 64) + start
        gradient_at = tl.multiple_of(address.to(tl.pointer_type(GRADIENT)) + start, 16)
        within = tl.arange(0, SIZE)
        left = tl.load(sizes + index) - start
        if left >= SIZE:
            tl.store(sum_at + within, tl.load(sum_at + within) + tl.load(gradient_at + within).to(tl.float32))
        else:
            inside = within < left
            gradient = tl.load(gradient_at + within, mask=inside).to(tl.float32)
            tl.store(sum_at + within, tl.load(sum_at + within, mask=inside) + gradient, mask=inside)


@triton.jit
def _add_squares(
    tensor_of,
    start_of,
    sizes,
    gradients,
    sums,
    count,
    GRADIENT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SIZE: tl.constexpr,
):
    first = tl.program_id(0) * AT_ONCE
    offsets = tl.arange(0, SIZE)
    total = tl.zeros([SIZE], dtype=tl.float32)
    for chunk in range(first, min(first + AT_ONCE, count)):
        index = tl.load(tensor_of + chunk)
        address = tl.load(gradients + index)
        if address != 0:
            start = tl.multiple_of(tl.load(start_of + chunk), 64)
            gradient_at = tl.multiple_of(address.to(tl.pointer_type(GRADIENT)) + start, 16)
            left = tl.load(sizes + index) - start
            if left >= SIZE:
                gradient = tl.load(gradient_at + offsets).to(tl.float32)
            else:
                gradient = tl.load(gradient_at + offsets, mask=offsets < left, other=0.0).to(tl.float32)
            total += gradient * gradient
    tl.store(sums + tl.program_id(0), tl.sum(total))


@triton.jit
def _update_chunk(
    gradient_at,
    weight_at,
    mean_at,
    square_at,
    master_at,
    factors,
    rate,
    beta1,
    beta2,
    decay,
    left,
    HAS_MASTER: tl.constexpr,
    DECOUPLED: tl.constexpr,
    SIZE: tl.constexpr,
):
    offsets = tl.arange(0, SIZE)
    inside = None if left is None else offsets < left
    lr, step, root = tl.load(factors) * rate, tl.load(factors + 1) * rate, tl.load(factors + 2)
    offset, scale = tl.load(factors + 3), tl.load(factors + 4)

    gradient = tl.load(gradient_at + offsets, mask=inside).to(tl.float32) * scale
    weight = tl.load((master_at if HAS_MASTER else weight_at) + offsets, mask=inside).to(tl.float32)
    if DECOUPLED:
        weight = weight * (1 - lr * decay)
    else:
        gradient = gradient + decay * weight
    mean = tl.load(mean_at + offsets, mask=inside)
    mean = mean + (1 - beta1) * (gradient - mean)
    square = beta2 * tl.load(square_at + offsets, mask=inside) + (1 - beta2) * gradient * gradient
    weight = weight - step * mean / (root * tl.sqrt(square) + offset)

    tl.store(mean_at + offsets, mean, mask=inside)
    tl.store(square_at + offsets, square, mask=inside)
    if HAS_MASTER:
        tl.store(master_at + offsets, weight, mask=inside)
    tl.store(weight_at + offsets, weight.to(weight_at.dtype.element_ty), mask=inside)


@triton.jit
def _update(
    tensor_of,
    start_of,
    sizes,
    offsets,
    rates,
    gradients,
    weights,
    means,
    squares,
    masters,
    factors,
    finite,
    beta1,
    beta2,
    decay,
    GRADIENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    DECOUPLED: tl.constexpr,
    SIZE: tl.constexpr,
):
    index = tl.load(tensor_of + tl.program_id(0))
    address = tl.load(gradients + index)
    if (tl.load(finite) != 0) & (address != 0):
        start = tl.multiple_of(tl.load(start_of + tl.program_id(0)), 64)
        offset = tl.multiple_of(tl.load(offsets + index), 64) + start
        gradient_at = tl.multiple_of(address.to(tl.pointer_type(GRADIENT)) + start, 16)
        weight_at = tl.multiple_of(tl.load(weights + index).to(tl.pointer_type(WEIGHT)) + start, 16)
        mean_at, square_at, master_at = means + offset, squares + offset, masters + offset
        rate = tl.load(rates + index)
        left = tl.load(sizes + index) - start
        if left >= SIZE:
            # Without a mask, loads and stores are 16 bytes wide.
            _update_chunk(
                gradient_at,
                weight_at,
                mean_at,
                square_at,
                master_at,
                factors,
                rate,
                beta1,
                beta2,
                decay,
                None,
                HAS_MASTER,
                DECOUPLED,
                SIZE,
            )
        else:
            _update_chunk(
                gradient_at,
                weight_at,
                mean_at,
                square_at,
                master_at,
                factors,
                rate,
                beta1,
                beta2,
                decay,
                left,
                HAS_MASTER,
                DECOUPLED,
                SIZE,
            )


@triton.jit
def _average(
    tensor_of,
    start_of,
    offsets,
    gradients,
    means,
    inputs,
    factors,
    finite,
    first,
    size,
    momentum,
    GRADIENT: tl.constexpr,
    NESTEROV: tl.constexpr,
    SIZE: tl.constexpr,
):
    index = tl.load(tensor_of + tl.program_id(0))
    start = tl.multiple_of(tl.load(start_of + tl.program_id(0)), 64)
    within = tl.arange(0, SIZE)
    inside = within < size - start
    input_at = inputs + (index - first) * size + start + within
    address = tl.load(gradients + index)
    if address == 0:
        tl.store(input_at, tl.zeros([SIZE], dtype=tl.bfloat16), mask=inside)
    elif tl.load(finite) != 0:
        gradient_at = tl.multiple_of(address.to(tl.pointer_type(GRADIENT)) + start, 16) + within
        mean_at = means + tl.multiple_of(tl.load(offsets + index), 64) + start + within
        gradient = tl.load(gradient_at, mask=inside).to(tl.float32) * tl.load(factors + 2)
        mean = tl.load(mean_at, mask=inside)
        mean = mean + (1 - momentum) * (gradient - mean)
        tl.store(mean_at, mean, mask=inside)
        tl.store(input_at, (gradient + momentum * (mean - gradient) if NESTEROV else mean).to(tl.bfloat16), mask=inside)


@triton.jit
def _subtract(
    tensor_of,
    start_of,
    offsets,
    rates,
    gradients,
    weights,
    masters,
    directions,
    factors,
    finite,
    first,
    size,
    decay,
    WEIGHT: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    SIZE: tl.constexpr,
):
    index = tl.load(tensor_of + tl.program_id(0))
    if (tl.load(finite) != 0) & (tl.load(gradients + index) != 0):
        start = tl.multiple_of(tl.load(start_of + tl.program_id(0)), 64)
        within = tl.arange(0, SIZE)
        inside = within < size - start
        weight_at = tl.multiple_of(tl.load(weights + index).to(tl.pointer_type(WEIGHT)) + start, 16) + within
        master_at = masters + tl.multiple_of(tl.load(offsets + index), 64) + start + within
        direction = tl.load(directions + (index - first) * size + start + within, mask=inside).to(tl.float32)
        lr = tl.load(factors) * tl.load(rates + index)
        weight = tl.load(master_at if HAS_MASTER else weight_at, mask=inside).to(tl.float32)
        weight = weight * (1 - lr * decay) - lr * direction
        if HAS_MASTER:
            tl.store(master_at, weight, mask=inside)
        tl.store(weight_at, weight.to(weight_at.dtype.element_ty), mask=inside)
