"""The kernels of best_tokens.py."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
BLOCKS_OF_A_CHUNK = 64


def pick(logits: Tensor, found: Tensor, tokens: Tensor, barred: tuple[int, int]) -> None:
    """Write the largest log-probabilities of each row, and their tokens, without the two barred tokens.

    logits [rows, vocabulary], contiguous; found fp32 and tokens int64 [rows, count].
    """
    (rows, vocabulary), count = logits.shape, found.shape[1]
    chunks = triton.cdiv(vocabulary, BLOCK * BLOCKS_OF_A_CHUNK)
    highest, sums = logits.new_empty(2, rows, chunks, dtype=torch.float32)
    maxima = logits.new_empty(rows, chunks * BLOCKS_OF_A_CHUNK, dtype=torch.float32)
    _scan[(rows, chunks)](
        logits,
        highest,
        sums,
        maxima,
        vocabulary,
        chunks,
        FIRST_BARRED=barred[0],
        SECOND_BARRED=barred[1],
        BLOCKS=BLOCKS_OF_A_CHUNK,
        BLOCK=BLOCK,
        num_warps=4,
    )
    few = triton.next_power_of_2(count)
    blocks = triton.next_power_of_2(maxima.shape[1])
    _pick[(rows,)](
        logits,
        highest,
        sums,
        maxima,
        found,
        tokens,
        vocabulary,
        chunks,
        maxima.shape[1],
        count,
        FIRST_BARRED=barred[0],
        SECOND_BARRED=barred[1],
        CHUNKS=triton.next_power_of_2(chunks),
        BLOCKS=blocks,
        BLOCK=BLOCK,
        COUNT=few,
        num_warps=1 if max(few * BLOCK, blocks) <= 1024 else 4,
    )


@triton.jit
def _scan(
    logits_at,
    highest_at,
    sums_at,
    maxima_at,
    vocabulary,
    chunks,
    FIRST_BARRED: tl.constexpr,
    SECOND_BARRED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write, for one chunk of a row, its maximum, the sum of exp(logit - maximum), and the maximum of each block."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = chunk * BLOCKS + tl.arange(0, BLOCKS)
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    logits = tl.load(logits_at + row * vocabulary + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    barred = (token == FIRST_BARRED) | (token == SECOND_BARRED)
    tl.store(maxima_at + row * chunks * BLOCKS + block, tl.max(tl.where(barred, float("-inf"), logits), axis=1))
    highest = tl.max(tl.max(logits, axis=1), axis=0)
    powers = tl.exp(logits - tl.where(highest == float("-inf"), 0.0, highest))
    tl.store(highest_at + row * chunks + chunk, highest)
    tl.store(sums_at + row * chunks + chunk, tl.sum(tl.sum(powers, axis=1), axis=0))


@triton.jit
def _pick(
    logits_at,
    highest_at,
    sums_at,
    maxima_at,
    found_at,
    tokens_at,
    vocabulary,
    chunks,
    blocks,
    count,
    FIRST_BARRED: tl.constexpr,
    SECOND_BARRED: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Find, for one row, the `count` blocks with the largest maxima, and in these the `count` largest logits, one by one."""
    row = tl.program_id(0).to(tl.int64)
    chunk, block, rank, offset = tl.arange(0, CHUNKS), tl.arange(0, BLOCKS), tl.arange(0, COUNT), tl.arange(0, COUNT * BLOCK)
    highs = tl.load(highest_at + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    sums = tl.load(sums_at + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    highest = tl.max(highs, axis=0)
    logarithm = tl.log(tl.sum(sums * tl.exp(highs - highest), axis=0))
    maxima = tl.load(maxima_at + row * blocks + block, mask=block < blocks, other=float("-inf"))
    chosen = tl.zeros([COUNT], tl.int32)
    for each in range(count):
        at = tl.argmax(maxima, axis=0)
        chosen = tl.where(rank == each, at, chosen)
        maxima = tl.where(block == at, float("-inf"), maxima)
    token = chosen[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    usable = (rank[:, None] < count) & (token < vocabulary) & (token != FIRST_BARRED) & (token != SECOND_BARRED)
    logits = tl.load(logits_at + row * vocabulary + token, mask=usable, other=float("-inf")).to(tl.float32)
    logits = tl.reshape(logits, [COUNT * BLOCK])
    best, tokens = tl.full([COUNT], float("-inf"), tl.float32), tl.zeros([COUNT], tl.int32)
    for each in range(count):
        largest, at = tl.max(logits, axis=0, return_indices=True)
        its_block = tl.sum(tl.where(rank == at // BLOCK, chosen, 0), axis=0)
        best = tl.where(rank == each, largest, best)
        tokens = tl.where(rank == each, its_block * BLOCK + at % BLOCK, tokens)
        logits = tl.where(offset == at, float("-inf"), logits)
    tl.store(found_at + row * count + rank, best - highest - logarithm, mask=rank < count)
    tl.store(tokens_at + row * count + rank, tokens.to(tl.int64), mask=rank < count)
