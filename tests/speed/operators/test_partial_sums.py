"""Totals of partial sums against sums in fp64."""

from __future__ import annotations

import pytest
import torch

DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(264, 3, 512), (264, 4, 1000), (128, 1, 2048), (1, 2, 24), (1025, 2, 72), (77, 1, 8192)])
def test_each_vector_has_its_total_in_its_own_dtype(shape: tuple[int, int, int]) -> None:
    from kilolayer.speed.operators.partial_sums_kernel import add_up

    parts, vectors, width = shape
    sums = torch.randn(parts, vectors, width, device="cuda")
    found, again = ([torch.full((width,), torch.nan, device="cuda", dtype=dtype) for dtype in DTYPES[-vectors:]] for _ in "ab")
    add_up(sums, found)
    add_up(sums, again)
    for total, same, expected in zip(found, again, sums.double().sum(dim=0).unbind(), strict=True):
        assert torch.equal(total, same)
        rounding = torch.finfo(total.dtype).eps
        torch.testing.assert_close(total.double(), expected, rtol=rounding, atol=1e-4)
