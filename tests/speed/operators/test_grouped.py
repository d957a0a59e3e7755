"""Grouped products against loops over groups, both ways that they are computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kilolayer.moe.groups import Groups
from kilolayer.speed.operators import grouped
from kilolayer.speed.operators.grouped import multiply_groups, spread
from tests.speed.operators.made_groups import SIZES, make

each_size = pytest.mark.parametrize(("sizes", "rest"), SIZES)
# fp32 with rows of 16 bytes is served by grouped_mm, fp64 and odd widths by blocks.
each_kind = pytest.mark.parametrize(
    ("dtype", "inputs", "outputs"), [(torch.float32, 8, 12), (torch.float64, 8, 12), (torch.float32, 5, 3)]
)


def product_by_loop(rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    out = rows.new_zeros(len(rows), weight.shape[1])
    start = 0
    for matrix, end in zip(weight, groups.ends.tolist(), strict=True):
        out[start:end] = rows[start:end] @ matrix.T
        start = end
    return out


@pytest.mark.matrix(4)
@each_size
@each_kind
def test_products_and_gradients_are_those_of_a_loop(
    sizes: list[int], rest: int, dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    groups = make(sizes, rest)
    rows = torch.randn(sum(sizes) + rest, inputs, dtype=dtype, requires_grad=True)
    weight = torch.randn(len(sizes), outputs, inputs, dtype=dtype, requires_grad=True)
    assert grouped._is_served(groups.ends, rows, weight) == (dtype == torch.float32 and inputs == 8 and len(rows) > 0)
    found, expected = multiply_groups(rows, weight, groups), product_by_loop(rows, weight, groups)
    torch.testing.assert_close(found, expected)
    gradient = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, (rows, weight), gradient),
        torch.autograd.grad(expected, (rows, weight), gradient),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@each_kind
def test_what_stands_behind_the_last_group_never_leaks(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    groups = make([2, 3], 4)
    rows = torch.randn(9, inputs, dtype=dtype)
    rows[5:] = torch.nan
    rows.requires_grad_()
    weight = torch.randn(2, outputs, inputs, dtype=dtype, requires_grad=True)
    bias = torch.randn(2, outputs, dtype=dtype, requires_grad=True)
    found = multiply_groups(rows, weight, groups)
    assert not found[5:].any()
    gradient = torch.ones_like(found)
    gradient[5:] = torch.inf
    (found + spread(bias, groups)).backward(gradient)
    gradients = [each.grad for each in (rows, weight, bias) if each.grad is not None]
    assert len(gradients) == 3
    assert not gradients[0][5:].any()
    assert all(bool(each.isfinite().all()) for each in gradients)


def test_an_expanded_gradient_is_taken() -> None:
    groups = make([3, 1], 0)
    rows, weight = torch.randn(4, 8, requires_grad=True), torch.randn(2, 4, 8)
    multiply_groups(rows, weight, groups).sum().backward()
    expected = torch.stack([weight[group].sum(dim=0) for group in groups.of_row])
    torch.testing.assert_close(rows.grad, expected)


@each_size
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_spread_looks_up_and_sums(sizes: list[int], rest: int, dtype: torch.dtype) -> None:
    groups = make(sizes, rest)
    table = torch.randn(len(sizes), 8, dtype=dtype, requires_grad=True)
    found = spread(table, groups)
    assert torch.equal(found, table[groups.of_row])
    gradient = torch.randn(found.shape, dtype=dtype)
    found.backward(gradient)
    parts = gradient[: sum(sizes)].double().split(sizes)
    torch.testing.assert_close(table.grad, torch.stack([part.sum(dim=0) for part in parts]).to(dtype))


@pytest.mark.parametrize("width", [8, 3])
def test_gradients_by_finite_differences(width: int) -> None:
    groups = make([2, 0, 3], 1)
    rows = torch.randn(6, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, width, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, w, b: (multiply_groups(x, w, groups) + spread(b, groups))[:5], (rows, weight, bias)
    )


def test_the_operators_keep_torchs_rules() -> None:
    groups = make([2, 0, 3], 1)
    rows, weight = torch.randn(6, 8, requires_grad=True), torch.randn(3, 4, 8, requires_grad=True)
    for arguments in ((rows, weight, groups.ends, True), (rows.detach()[:, :4], weight.detach(), groups.ends, False)):
        torch.library.opcheck(grouped.grouped_product, arguments, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(grouped.grouped_outer, (rows.detach(), rows.detach(), groups.ends))
    torch.library.opcheck(grouped.group_sums, (rows.detach(), *groups))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@each_size
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_computes_the_same_without_waiting(sizes: list[int], rest: int, dtype: torch.dtype) -> None:
    groups = make([9 * size for size in sizes], rest)
    rows = torch.randn(len(groups.of_row), 32, dtype=dtype, requires_grad=True)
    weight = torch.randn(len(sizes), 48, 32, dtype=dtype, requires_grad=True)
    bias = torch.randn(len(sizes), 48, dtype=dtype, requires_grad=True)
    found = []
    for device, kind in (("cuda", dtype), ("cpu", torch.float64)):
        x, w, b = (each.detach().to(device, kind).requires_grad_() for each in (rows, weight, bias))
        there = Groups(groups.ends.to(device), groups.of_row.to(device))
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            y = multiply_groups(x, w, there) + spread(b, there)
            y.square().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append([y.detach()[: sum(sizes) * 9], x.grad, w.grad, b.grad])
    for ours, exact in zip(*found, strict=True):
        assert ours is not None
        assert exact is not None
        scale = max(float(exact.abs().max()), 1.0) if exact.numel() else 1.0
        torch.testing.assert_close(ours.cpu().double() / scale, exact / scale, rtol=0, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[4000], [0, 3999, 0, 1], [31] * 100, [0] * 50 + [700, 1, 2, 0, 3000]])
def test_many_rows_are_summed_on_a_gpu(sizes: list[int], dtype: torch.dtype) -> None:
    groups = Groups(*(each.cuda() for each in make(sizes, 7)))
    rows = torch.randn(sum(sizes) + 7, 1000, device="cuda").to(dtype)
    rows[-7:] = torch.nan
    found, again = (grouped.group_sums(rows, *groups) for _ in range(2))
    expected = torch.stack([part.sum(dim=0) for part in rows[:-7].double().split(sizes)])
    assert torch.equal(found, again)
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-3)
