"""ReLU and norm of groups against a loop over groups in fp64: the formulas on the CPU, the kernels on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.moe.groups import Groups
from kilolayer.speed.operators.grouped_norm import grouped_relu_norm, grouped_relu_norm_backward
from kilolayer.speed.operators.random_bits import keep_mask
from tests.fixtures.formulas import close
from tests.speed.operators.made_groups import SIZES, make

pytestmark = pytest.mark.filterwarnings("default")  # the compiler warns about itself
SETTINGS = [  # device, dtype of the products, tolerance
    ("cpu", torch.float64, 1e-12),
    ("cpu", torch.float32, 1e-5),
    pytest.param("cuda", torch.bfloat16, 1e-2, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.float16, 2e-3, marks=pytest.mark.gpu),
]
each_setting = pytest.mark.parametrize(("device", "dtype", "tolerance"), SETTINGS)
each_kind = pytest.mark.parametrize(("centred", "shifted"), [(True, True), (True, False), (False, True), (False, False)])
EPS = 1e-3


def norm_by_loop(
    product: Tensor, shift: Tensor | None, gain: Tensor, bias: Tensor | None, groups: Groups, kept: Tensor | float
) -> Tensor:
    """The norm of the rows of each group, one group after the other; kept: what is multiplied in behind the ReLU."""
    kept = torch.as_tensor(kept).expand(product.shape)
    parts, start = [], 0
    for group, end in enumerate(groups.ends.tolist()):
        before = product[start:end] if shift is None else product[start:end] + shift[group]
        hidden = before.relu() * kept[start:end]
        if bias is None:
            parts.append(F.rms_norm(hidden, gain.shape[1:], gain[group], EPS))
        else:
            parts.append(F.layer_norm(hidden, gain.shape[1:], gain[group], bias[group], EPS))
        start = end
    return torch.cat(parts)


def compare(
    sizes: list[int],
    rest: int,
    width: int,
    centred: bool,
    shifted: bool,
    device: str,
    dtype: torch.dtype,
    tolerance: float,
    p: float = 0.0,
) -> None:
    """Output and all gradients are those of the loop, whatever stands behind the last group."""
    seed = torch.tensor([31], device=device)
    groups = Groups(*(each.to(device) for each in make(sizes, rest)))
    precise = torch.promote_types(dtype, torch.float32)
    inside, rows = sum(sizes), sum(sizes) + rest
    product, gradient = ((torch.randn(rows, width, device=device) + 0.2).to(dtype) for _ in range(2))
    product[inside:], gradient[inside:] = torch.nan, torch.nan
    shift = torch.randn(len(sizes), width, device=device).to(dtype) if shifted else None
    gain = torch.rand(len(sizes), width, device=device, dtype=precise) + 0.5
    bias = torch.randn(len(sizes), width, device=device, dtype=precise) if centred else None
    given = [None if each is None else each.requires_grad_() for each in (product, shift, gain, bias)]
    exact: list[Any] = [None if each is None else each.detach().double().requires_grad_() for each in given]
    found, statistics = grouped_relu_norm(product, *groups, shift, gain, bias, EPS, seed, p)
    expected = norm_by_loop(*exact, groups, keep_mask(seed, product.shape, p).double() / (1 - p))
    assert (found.dtype, statistics.dtype) == (dtype, precise)
    close(found[:inside], expected, tolerance)
    assert not found[inside:].any()
    assert not statistics[:, inside:].any()
    found.backward(gradient)
    expected.backward(gradient[:inside].double())
    assert product.grad is not None
    assert not product.grad[inside:].any()
    exact[0].grad[inside:] = 0
    for ours, theirs in zip(given, exact, strict=True):
        if ours is not None:
            assert ours.grad is not None
            assert ours.grad.dtype == ours.dtype
            # fp32 stays fp32: only what is written in the products' dtype may be rounded.
            close(ours.grad, theirs.grad, 1e-5 if ours.dtype == torch.float32 else tolerance)


@pytest.mark.matrix(4)
@each_setting
@each_kind
@pytest.mark.parametrize(("sizes", "rest"), [each for each in SIZES if sum(each[0]) > 0])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_values_and_gradients_are_those_of_a_loop(
    sizes: list[int], rest: int, p: float, centred: bool, shifted: bool, device: str, dtype: torch.dtype, tolerance: float
) -> None:
    compare(sizes, rest, 24, centred, shifted, device, dtype, tolerance, p)


# Fewer rows than programs and more, many groups and few, in parts that hold several groups, or one of many.
MANY = [([5] * 64, 3), ([0, 3000, 0, 1], 0), ([3000], 5), ([0] * 40 + [700] + [0] * 30 + [1, 2, 299], 600)]


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "rest"), MANY)
@pytest.mark.parametrize(("width", "full"), [(64, True), (1000, True), (2048, True), (4096, True), (4096, False), (8192, True)])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_many_rows_on_a_gpu(sizes: list[int], rest: int, p: float, width: int, full: bool) -> None:
    compare(sizes, rest, width, full, full, "cuda", torch.bfloat16, 1e-2, p)


@each_setting
def test_where_no_row_has_a_group(device: str, dtype: torch.dtype, tolerance: float) -> None:
    groups = Groups(*(each.to(device) for each in make([0, 0, 0], 3)))
    product = torch.full((3, 24), torch.nan, device=device, dtype=dtype, requires_grad=True)
    tables = [torch.ones(3, 24, device=device, dtype=torch.promote_types(dtype, torch.float32)) for _ in range(3)]
    shift, gain, bias = (each.requires_grad_() for each in tables)
    normed, _ = grouped_relu_norm(product, *groups, shift, gain, bias, EPS)
    normed.backward(torch.full_like(normed, torch.nan))
    for each in (normed, product.grad, shift.grad, gain.grad, bias.grad):
        assert each is not None
        assert not each.any()


@each_setting
def test_what_is_not_finite_is_seen_where_it_is(device: str, dtype: torch.dtype, tolerance: float) -> None:
    groups = Groups(*(each.to(device) for each in make([2, 3], 0)))
    product = torch.randn(5, 24, device=device).to(dtype)
    product[3, 7] = torch.nan
    shift = torch.zeros(2, 24, device=device, dtype=dtype)
    gain, bias = torch.ones(2, 2, 24, device=device, dtype=torch.promote_types(dtype, torch.float32))
    given = [each.requires_grad_() for each in (product, shift, gain, bias)]
    normed, _ = grouped_relu_norm(product, *groups, *given[1:], EPS)
    normed.backward(torch.ones_like(normed))
    assert normed.isnan().all(dim=1).tolist() == [False, False, False, True, False]
    of_product, of_shift, of_gain, _ = (each.grad for each in given)
    assert of_product is not None
    assert of_shift is not None
    assert of_gain is not None
    assert of_product.isnan().any(dim=1).tolist() == [False, False, False, True, False]
    for of_table in (of_shift, of_gain):
        assert of_table.isnan().any(dim=1).tolist() == [False, True]


@each_setting
def test_rows_that_do_not_lie_one_after_another(device: str, dtype: torch.dtype, tolerance: float) -> None:
    groups = Groups(*(each.to(device) for each in make([2, 0, 3], 1)))
    product, gradient = torch.randn(2, 24, 6, device=device, dtype=dtype).mT
    gain, bias = torch.rand(2, 3, 24, device=device, dtype=torch.promote_types(dtype, torch.float32))
    found = []
    for p, g in ((product, gradient), (product.contiguous(), gradient.contiguous())):
        given = p.detach().requires_grad_()
        normed, _ = grouped_relu_norm(given, *groups, None, gain, bias, EPS)
        normed.backward(g)
        found.append((normed, given.grad))
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs.double(), tolerance)


@pytest.mark.matrix(2)
@each_kind
def test_gradients_by_finite_differences(centred: bool, shifted: bool) -> None:
    groups = make([2, 0, 3], 1)
    product = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    shift, gain, bias = (each.requires_grad_() for each in torch.rand(3, 3, 5, dtype=torch.float64))

    def run(product: Tensor, shift: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        tables = (shift if shifted else None, gain, bias if centred else None)
        return grouped_relu_norm(product, *groups, *tables, EPS)[0]

    assert torch.autograd.gradcheck(run, (product, shift, gain, bias), check_undefined_grad=False)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "dtype", "tolerance"), SETTINGS[1:])
@pytest.mark.parametrize("full", [True, False])
def test_the_operators_are_what_they_say_to_the_compiler(full: bool, device: str, dtype: torch.dtype, tolerance: float) -> None:
    groups = Groups(*(each.to(device) for each in make([2, 0, 3], 1)))
    product, gradient = torch.randn(2, 6, 24, device=device, dtype=dtype)
    shift, (gain, bias) = torch.randn(3, 24, device=device, dtype=dtype), torch.rand(2, 3, 24, device=device)
    tables = (shift if full else None, gain, bias if full else None)
    given = (product.requires_grad_(), *groups, *(None if each is None else each.requires_grad_() for each in tables), EPS)
    draw = (torch.tensor(5, device=device), 0.3) if full else ()
    torch.library.opcheck(grouped_relu_norm, (*given, *draw), rtol=2 * tolerance, atol=2 * tolerance)
    product, ends, of_row, shift, gain, _, _ = (each.detach() if isinstance(each, Tensor) else each for each in given)
    statistics = grouped_relu_norm(*given, *draw)[1].detach()
    backward = (gradient, product, ends, of_row, shift, gain, statistics, *draw)
    torch.library.opcheck(grouped_relu_norm_backward, backward, rtol=2 * tolerance, atol=2 * tolerance)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_gpu_computes_the_same_each_time_without_waiting() -> None:
    groups = Groups(*(each.cuda() for each in make([700, 0, 1, 2000], 99)))
    product, gradient = torch.randn(2, 2800, 4096, device="cuda", dtype=torch.bfloat16)
    shift, (gain, bias) = torch.randn(4, 4096, device="cuda").bfloat16(), torch.rand(2, 4, 4096, device="cuda")
    found = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            normed, statistics = grouped_relu_norm(product, *groups, shift, gain, bias, EPS)
            of_product, totals = grouped_relu_norm_backward(gradient, product, *groups, shift, gain, statistics)
            found.append([normed, of_product, *totals])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


@pytest.mark.slow
def test_the_compiler_need_not_know_how_many_rows_there_are() -> None:
    torch._dynamo.reset()
    groups = make([2, 0, 3], 0)
    x, kept = torch.randn(9, 24, requires_grad=True), torch.tensor([True, False, True, True, False, True, False, True, False])
    gain, bias = torch.rand(2, 3, 24)

    def run(x: Tensor, kept: Tensor, ends: Tensor, of_row: Tensor) -> Tensor:
        return grouped_relu_norm(x[kept], ends, of_row, None, gain, bias, EPS)[0].square().sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        found, expected = (torch.autograd.grad(each(x, kept, *groups), x)[0] for each in (compiled, run))
    torch.testing.assert_close(found, expected)
