"""Fused norms against plain ones in fp64: the formulas on the CPU, the kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.layers.norms.layer import LayerNorm
from kilolayer.layers.norms.rms import RMSNorm
from kilolayer.speed.operators.fused_norm import (
    can_fuse_inner_norm,
    can_fuse_residual_norm,
    inner_norm,
    inner_norm_backward,
    residual_norm,
    residual_norm_backward,
)
from kilolayer.speed.operators.random_bits import keep_mask
from tests.fixtures.formulas import close

pytestmark = pytest.mark.filterwarnings("default")  # the compiler warns about itself
SETTINGS = [  # device, dtype of the products, tolerance
    ("cpu", torch.float32, 1e-5),
    pytest.param("cuda", torch.bfloat16, 1e-2, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.float16, 2e-3, marks=pytest.mark.gpu),
]
SHAPES = [(1, 1, 64), (3, 5, 96), (2, 33, 512), (7, 11, 1000), (1, 9, 2048)]
MANY_ROWS = (1, 3001, 512)  # more than all programs take at once
EPS = 1e-3


def norm(x: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    size = x.shape[-1:]
    return F.rms_norm(x, size, gain, EPS) if bias is None else F.layer_norm(x, size, gain, bias, EPS)


def leaves(*made: Tensor | None) -> tuple[list[Tensor | None], list[Any]]:
    """The same tensors with gradients: as they are, and in fp64."""
    given = [None if each is None else each.requires_grad_() for each in made]
    return given, [None if each is None else each.detach().double().requires_grad_() for each in given]


@pytest.mark.matrix(4)
@pytest.mark.parametrize(("device", "dtype", "tolerance"), SETTINGS)
@pytest.mark.parametrize("shape", [*SHAPES, MANY_ROWS])
@pytest.mark.parametrize(
    ("centred", "shifted", "scaled", "readers"),
    [
        (True, True, False, "both"),
        (True, False, True, "precise"),
        (False, True, True, "rounded"),
        (False, False, False, "both"),
    ],
)
@pytest.mark.parametrize("keeps_sum", [False, True])
def test_residual_and_norm(
    keeps_sum: bool,
    shape: tuple[int, ...],
    centred: bool,
    shifted: bool,
    scaled: bool,
    readers: str,
    device: str,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    width, skip, branch = shape[-1:], 2.5, 0.7
    x = torch.randn(shape, device=device) + 0.5
    y = torch.randn(shape, device=device).to(dtype)
    shift = torch.randn(width, device=device).to(dtype) if shifted else None
    omega = torch.rand(width, device=device) + 0.5 if scaled else None
    gain = torch.rand(width, device=device) + 0.5
    bias = torch.randn(width, device=device) if centred else None
    given, exact = leaves(x, y, shift, omega, gain, bias)
    precise, rounded, _ = residual_norm(x, y, shift, omega, skip, branch, gain, bias, EPS, keeps_sum)
    x, y, shift, omega, gain, bias = exact
    added = skip * x * (1 if omega is None else omega) + branch * (y if shift is None else y + shift)
    normed = norm(added, gain, bias)
    first = added if keeps_sum else normed
    close(precise, first, 1e-5)
    close(rounded, normed, tolerance)
    assert rounded.dtype == dtype
    read = {"precise": [precise], "rounded": [rounded], "both": [precise, rounded]}[readers]
    expected = {"precise": [first], "rounded": [normed], "both": [first, normed]}[readers]
    gradients = [torch.randn_like(each) for each in read]
    torch.autograd.backward(read, gradients)
    torch.autograd.backward(expected, [each.double() for each in gradients])
    for ours, theirs in zip(given, exact, strict=True):
        if theirs is not None and theirs.grad is None:  # of a norm that nobody read
            assert ours is not None
            assert not ours.grad.any()
        elif ours is not None:
            # fp32 stays fp32: only what is written in the products' dtype may be rounded.
            close(ours.grad, theirs.grad, 1e-5 if ours.dtype == torch.float32 else tolerance)


@pytest.mark.matrix(3)
@pytest.mark.parametrize(("device", "dtype", "tolerance"), SETTINGS)
@pytest.mark.parametrize("shape", [*SHAPES, MANY_ROWS, (2, 3, 8192)])
@pytest.mark.parametrize("centred", [True, False])
def test_inner_norm(shape: tuple[int, ...], centred: bool, device: str, dtype: torch.dtype, tolerance: float) -> None:
    x = (torch.randn(shape, device=device) + 0.5).to(dtype)
    gain = torch.rand(shape[-1:], device=device) + 0.5
    bias = torch.randn(shape[-1:], device=device) if centred else None
    given, exact = leaves(x, gain, bias)
    found, expected = inner_norm(x, gain, bias, EPS)[0], norm(*exact)
    gradient = torch.randn_like(found)
    found.backward(gradient)
    expected.backward(gradient.double())
    assert found.dtype == dtype
    close(found, expected, tolerance)
    for ours, theirs in zip(given, exact, strict=True):
        if ours is not None:
            close(ours.grad, theirs.grad, 1e-5 if ours.dtype == torch.float32 else tolerance)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(1, 64), (15, 96), (77, 1000), (601, 512)])
@pytest.mark.parametrize(
    ("centred", "shifted", "learned"), [(True, True, False), (True, True, True), (False, False, True), (False, False, False)]
)
@pytest.mark.parametrize("keeps_sum", [False, True])
def test_totals_are_in_the_dtypes_of_their_parameters(
    shape: tuple[int, int], keeps_sum: bool, centred: bool, shifted: bool, learned: bool, device: str
) -> None:
    x, y, precise, rounded = (torch.randn(shape, device=device) for _ in range(4))
    shift, omega, gain, bias = (torch.rand(shape[1], device=device) + 0.5 for _ in range(4))
    y, rounded, shift = y.bfloat16(), rounded.bfloat16(), shift.bfloat16()
    some = (shift if shifted else None, omega if learned else None)
    first, _, statistics = residual_norm(x, y, *some, 2.0, 0.5, gain, bias if centred else None, EPS, keeps_sum)
    terms = (first, x if learned else None, None) if keeps_sum else (None, x, y)
    totals = residual_norm_backward(precise, rounded, *terms, *some, 2.0, 0.5, gain, statistics, y.dtype, learned)[2]
    exact = [each.double().requires_grad_() for each in (gain, bias, shift, omega)]
    of_gain, of_bias, of_shift, of_omega = exact
    wide = x.double().requires_grad_()
    before = 2.0 * (of_omega if learned else 1.0) * wide + 0.5 * (y.double() + (of_shift if shifted else 0.0))
    normed = norm(before, of_gain, of_bias if centred else None)
    torch.autograd.backward([before if keeps_sum else normed, normed], [precise.double(), rounded.double()])
    there = (True, centred, shifted, learned)
    expected = [
        (of, each.dtype) for of, each, is_there in zip(exact, (gain, bias, shift, omega), there, strict=True) if is_there
    ]
    for found, (of, dtype) in zip(totals, expected, strict=True):
        assert found.dtype == dtype
        close(found, of.grad, 1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(1, 64), (15, 96), (77, 1000), (601, 512)])
@pytest.mark.parametrize("centred", [True, False])
def test_behind_a_relu_the_gradient_of_its_bias_is_the_last_total(shape: tuple[int, int], centred: bool, device: str) -> None:
    before, gradient = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
    gain, bias = (torch.rand(shape[1], device=device) + 0.5 for _ in range(2))
    statistics = inner_norm(before.relu(), gain, bias if centred else None, EPS)[1]
    _, totals = inner_norm_backward(gradient, before.relu(), gain, statistics, True)
    exact = [each.double().requires_grad_() for each in (gain, *([bias] if centred else []), torch.zeros_like(gain))]
    *parameters, shift = exact
    norm((before.double() + shift).relu(), parameters[0], parameters[1] if centred else None).backward(gradient.double())
    assert [found.dtype for found in totals] == [torch.float32] * len(parameters) + [torch.bfloat16]
    for found, of in zip(totals, exact, strict=True):
        close(found, of.grad, 1e-2 if found.dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), SETTINGS)
@pytest.mark.parametrize("keeps_sum", [False, True])
def test_rows_that_do_not_lie_one_after_another(keeps_sum: bool, device: str, dtype: torch.dtype, tolerance: float) -> None:
    x, y, first, second = (torch.randn(4, 64, 6, device=device).mT for _ in range(4))
    gain, bias = torch.rand(64, device=device), torch.randn(64, device=device)
    given, exact = leaves(x, y.to(dtype))
    precise, rounded, _ = residual_norm(*given, None, None, 1.5, 1.0, gain, bias, EPS, keeps_sum)
    torch.autograd.backward([precise, rounded], [first, second.to(dtype)])
    added = 1.5 * exact[0] + exact[1]
    normed = norm(added, gain.double(), bias.double())
    expected = added if keeps_sum else normed
    torch.autograd.backward([expected, normed], [first.double(), second.to(dtype).double()])
    close(precise, expected, 1e-5)
    for ours, theirs in zip(given, exact, strict=True):
        close(ours.grad if ours is not None else None, theirs.grad, tolerance)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), SETTINGS)
@pytest.mark.parametrize("keeps_sum", [False, True])
def test_what_is_not_finite_is_seen(keeps_sum: bool, device: str, dtype: torch.dtype, tolerance: float) -> None:
    x, y, gain = torch.randn(6, 96, device=device), torch.randn(6, 96, device=device).to(dtype), torch.ones(96, device=device)
    x[2, 5], y[4, 95] = torch.nan, torch.inf
    (x, y, gain), _ = leaves(x, y, gain)
    assert x is not None
    assert gain is not None
    precise, rounded, _ = residual_norm(x, y, None, None, 1.0, 1.0, gain, torch.zeros_like(gain), EPS, keeps_sum)
    for found in (rounded,) if keeps_sum else (precise, rounded):
        assert found.isnan().all(dim=1).tolist() == [False, False, True, False, True, False]
    torch.autograd.backward([precise, rounded], [torch.ones_like(precise), torch.ones_like(rounded)])
    assert x.grad is not None
    assert gain.grad is not None
    assert x.grad.isnan().all(dim=1).tolist() == [False, False, True, False, True, False]
    assert gain.grad.isnan().all()


@pytest.mark.slow
@pytest.mark.matrix(3)
@pytest.mark.parametrize(("device", "dtype", "tolerance"), SETTINGS)
@pytest.mark.parametrize("full", [True, False])
def test_the_operators_are_what_they_say_to_the_compiler(full: bool, device: str, dtype: torch.dtype, tolerance: float) -> None:
    x, y, precise, rounded = (torch.randn(2, 7, 24, device=device) for _ in range(4))
    shift, omega, gain, bias = (torch.randn(24, device=device) for _ in range(4))
    y, rounded, shift = y.to(dtype), rounded.to(dtype), shift.to(dtype)
    absent = [each if full else None for each in (shift, omega, bias)]
    tolerances = {"rtol": 2 * tolerance, "atol": 2 * tolerance}
    given, _ = leaves(x, y, *absent[:2], gain, absent[2])
    draw = (torch.tensor(7, device=device), 0.3, torch.rand(2, device=device)) if full else ()
    for keeps_sum in (False, True):
        torch.library.opcheck(residual_norm, (*given[:4], 2.0, 1.0, *given[4:], EPS, keeps_sum, *draw), **tolerances)
    torch.library.opcheck(inner_norm, (given[1], *given[4:], EPS), **tolerances)
    x, y, shift, omega, gain, bias = (None if each is None else each.detach() for each in given)
    statistics = residual_norm(x, y, shift, omega, 2.0, 1.0, gain, bias, EPS, False)[2]
    gradients = (precise, rounded) if full else (None, rounded)
    for terms in ((None, x, y), (precise, x if full else None, None)):
        others = (shift, omega, 2.0, 1.0, gain, statistics, dtype, full, *draw)
        torch.library.opcheck(residual_norm_backward, (*gradients, *terms, *others), **tolerances)
    torch.library.opcheck(inner_norm_backward, (rounded, y, gain, statistics, full, 1.5 if full else 1.0), **tolerances)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_a_norm_computes_in_its_own_dtype_and_returns_that_of_its_input(kind: type[LayerNorm] | type[RMSNorm]) -> None:
    norm, x = kind(24, eps=EPS), torch.randn(5, 24).bfloat16()
    assert torch.equal(norm(x), norm(x.float()).bfloat16())
    assert norm(x.float()).dtype == torch.float32


@pytest.mark.slow
def test_a_compiled_layer_can_ask_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr("kilolayer.speed.operators.kernels.why_no_kernels", lambda: "Triton is not installed")
    asked = (torch.device("cuda"), torch.float32, torch.bfloat16, 512)
    ask = torch.compile(lambda x: x if can_fuse_residual_norm(*asked) else -x, backend="eager", fullgraph=True)
    assert ask(torch.ones(1)) == -1


@pytest.mark.parametrize("can_fuse", [can_fuse_residual_norm, can_fuse_inner_norm])
def test_they_serve_half_precision_on_a_gpu(can_fuse: Callable[..., bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kilolayer.speed.operators.kernels.why_no_kernels", lambda: None)
    gpu, cpu, single, half = torch.device("cuda"), torch.device("cpu"), torch.float32, torch.bfloat16
    assert can_fuse(gpu, single, half, 512)
    assert can_fuse(gpu, single, torch.float16, 8192)
    assert not can_fuse(cpu, single, half, 512)
    assert not can_fuse(gpu, single, single, 512)
    assert not can_fuse(gpu, half, half, 512)
    assert not can_fuse(gpu, single, half, 100)
    assert not can_fuse(gpu, single, half, 8200)
    monkeypatch.setattr("kilolayer.speed.operators.kernels.why_no_kernels", lambda: "Triton is not installed")
    assert not can_fuse(gpu, single, half, 512)


@pytest.mark.matrix(24)
@pytest.mark.parametrize(("device", "dtype", "tolerance"), [("cpu", torch.float64, 1e-12), *SETTINGS])
@pytest.mark.parametrize("shape", [(1, 1, 64), (7, 11, 1000), (2, 1501, 512)])
@pytest.mark.parametrize(("p", "by_sample"), [(0.3, False), (0.3, True), (0.0, True)])
@pytest.mark.parametrize(("centred", "full"), [(True, True), (False, False)])
@pytest.mark.parametrize("keeps_sum", [False, True])
def test_a_branch_that_is_dropped(
    keeps_sum: bool,
    centred: bool,
    full: bool,
    p: float,
    by_sample: bool,
    shape: tuple[int, ...],
    device: str,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """Values and all gradients are those of the plain formula with the mask multiplied in."""
    width, skip, branch, precisely = shape[-1:], 2.5, 0.7, torch.promote_types(dtype, torch.float32)
    x = torch.randn(shape, device=device, dtype=precisely) + 0.5
    y = torch.randn(shape, device=device).to(dtype)
    shift = torch.randn(width, device=device).to(dtype) if full else None
    omega = torch.rand(width, device=device, dtype=precisely) + 0.5 if full else None
    gain = torch.rand(width, device=device, dtype=precisely) + 0.5
    bias = torch.randn(width, device=device, dtype=precisely) if centred else None
    seed = torch.tensor([1234567890123456789], device=device)
    samples = torch.tensor([0.0, 1.25] * 4, device=device)[1 : 1 + shape[0]] if by_sample else None
    given, exact = leaves(x, y, shift, omega, gain, bias)
    draw = (seed, p, samples)
    precise, rounded, _ = residual_norm(x, y, shift, omega, skip, branch, gain, bias, EPS, keeps_sum, *draw)
    x, y, shift, omega, gain, bias = exact
    factor = keep_mask(seed, shape, p).double() / (1 - p)
    if samples is not None:
        factor = factor * samples.double()[:, None, None]
    added = skip * x * (1 if omega is None else omega) + branch * factor * (y if shift is None else y + shift)
    normed = norm(added, gain, bias)
    first = added if keeps_sum else normed
    close(precise, first, min(tolerance, 1e-5))
    close(rounded, normed, tolerance)
    gradients = [torch.randn_like(each) for each in (precise, rounded)]
    torch.autograd.backward([precise, rounded], gradients)
    torch.autograd.backward([first, normed], [each.double() for each in gradients])
    for ours, theirs in zip(given, exact, strict=True):
        if ours is not None:
            close(ours.grad, theirs.grad, min(tolerance, 1e-5) if ours.dtype == precisely else tolerance)
    of_y = given[1].grad if given[1] is not None else None
    assert of_y is not None
    assert not of_y[factor == 0].any()
