"""The feed-forward network with an inner norm as one unit against one in fp64: the formulas on the CPU, kernels on a GPU."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.layers import normed_network as unit
from kilolayer.layers.fused_norm import inner_norm, inner_norm_backward
from kilolayer.layers.normed_network import normed_network, normed_product_backward
from kilolayer.layers.relu_network import GENERATIONS
from kilolayer.layers.relu_product import relu_product

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-2}
EPS = 1e-3
# Whole tiles of the kernel or not; a dim of 20 is no multiple of 16 bytes.
SHAPES = [(1, 1, 16, 64), (3, 43, 32, 72), (1, 64, 20, 104), (5, 13, 64, 256), (7, 101, 128, 1000), (2, 333, 72, 4096)]


def close(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None
    assert expected is not None
    assert found.shape == expected.shape
    error = float((found.detach().double() - expected.detach()).abs().max())
    assert error <= TOLERANCE[found.device.type] * max(1.0, float(expected.detach().abs().max()))


def network(batch: int, length: int, dim: int, width: int, device: str, centred: bool, biased: bool) -> list[Tensor | None]:
    """x, W_1, b_1, gain, LayerNorm's bias, W_2 and b_2, of sizes that keep all sums near 1."""
    shapes = {(batch, length, dim): 1.0, (width, dim): dim**-0.5, (width,): 1.0, (dim, width): width**-0.5, (dim,): 1.0}
    x, first, bias, second, last_bias = (
        (torch.randn(shape) * size).to(device, DTYPES[device]).requires_grad_() for shape, size in shapes.items()
    )
    gain, norm_bias = (torch.randn(width, device=device, requires_grad=True) for _ in range(2))
    return [x, first, bias, gain, norm_bias if centred else None, second, last_bias if biased else None]


def run(x: Tensor, *given: Any) -> Tensor:
    return normed_network(x, *given[:4], EPS, *given[4:])


def plain(
    x: Tensor, first: Tensor, bias: Tensor, gain: Tensor, norm_bias: Tensor | None, second: Tensor, hidden: Tensor
) -> Tensor:
    """The network without its last bias. The norm reads what was rounded; where fp64 finds a sum on the other side of 0, that
    says what passes."""
    read = F.linear(x, first, bias) * (hidden > 0)
    read = read + (hidden.double() - read).detach()
    width = gain.shape
    normed = F.rms_norm(read, width, gain, EPS) if norm_bias is None else F.layer_norm(read, width, gain, norm_bias, EPS)
    return F.linear(normed, second)


def assert_exact(given: list[Any], transposed: bool = False) -> None:
    """The network and all its gradients are those of fp64."""
    exact: list[Any] = [None if each is None else each.detach().double().requires_grad_() for each in given]
    found = run(*given)
    expected = plain(*exact[:6], relu_product(*given[:3]).detach())
    expected = expected if exact[6] is None else expected + exact[6]
    gradient = torch.randn_like(found)
    gradient = gradient.mT.contiguous().mT if transposed else gradient
    found.backward(gradient)
    expected.backward(gradient.double())
    close(found, expected)
    for ours, theirs in zip(given, exact, strict=True):
        if ours is not None:
            close(ours.grad, theirs.grad)


def fail(*_: Any) -> NoReturn:
    pytest.fail("not to be called")


def begun_anywhere(given: Tensor) -> Tensor:
    """The same numbers, one further in memory."""
    return torch.cat([given.new_zeros(1), given.flatten()])[1:].view(given.shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(("biased", "transposed"), [(False, False), (True, True)])
@pytest.mark.parametrize("device", DEVICES)
def test_network_and_gradients(
    shape: tuple[int, int, int, int], centred: bool, biased: bool, transposed: bool, device: str
) -> None:
    assert_exact(network(*shape, device, centred, biased), transposed)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("centred", [True, False])
def test_an_older_gpu_has_the_product_and_a_pass(
    shape: tuple[int, int, int, int], centred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (8, 9))
    monkeypatch.setattr("kilolayer.layers.normed_product_kernel.multiply_and_go_back", fail)
    assert_exact(network(*shape, "cuda", centred, True))


def backward_of(rows: int, dim: int, width: int, device: str, dtype: torch.dtype, centred: bool) -> tuple[Any, ...]:
    """What `normed_product_backward` takes, with a gradient that is nearly the output: most of it is along the norm's own."""
    weight, hidden = torch.randn(dim, width) * width**-0.5, torch.randn(rows, width).relu()
    weight, hidden = (each.to(device, dtype) for each in (weight, hidden))
    gain, bias = 1 + 0.1 * torch.randn(width, device=device), 0.1 * torch.randn(width, device=device) if centred else None
    last_bias = torch.randn(dim).to(weight)
    normed, statistics = inner_norm(hidden, gain, bias, EPS)
    y = F.linear(normed, weight)
    gradient = y + 0.05 * torch.randn_like(y)
    return gradient, weight, hidden, gain, bias, statistics, y + last_bias, last_bias


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("rows", [1, 300, 20_001])
def test_sums_over_rows(rows: int, centred: bool, device: str) -> None:
    given = backward_of(rows, 64, 136, device, DTYPES[device], centred)
    gradient, weight, hidden, gain, _, statistics, *_ = (None if each is None else each.double() for each in given)
    assert isinstance(gradient, Tensor)
    expected = inner_norm_backward(*(each.cpu() for each in (gradient @ weight, hidden, gain, statistics)), True)
    passed, totals = normed_product_backward(*given)
    for found, exact in zip((passed, *totals), (expected[0], *expected[1]), strict=True):
        close(found, exact.to(device))


@pytest.mark.gpu
@pytest.mark.parametrize("moved", [0, 1, 2, 6])
def test_views_may_begin_anywhere(moved: int) -> None:
    given = list(backward_of(43, 64, 136, "cuda", torch.bfloat16, True))
    passed, totals = normed_product_backward(*given)
    given[moved] = begun_anywhere(given[moved])
    also_passed, also_totals = normed_product_backward(*given)
    for found, expected in zip((also_passed, *also_totals), (passed, *totals), strict=True):
        close(found, expected.double())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("centred", [True, False])
def test_a_rounded_output_costs_less_than_a_rounded_gradient(centred: bool, device: str) -> None:
    given = backward_of(300, 128, 512, device, torch.bfloat16, centred)
    gradient, weight, hidden, gain, _, statistics, *_ = given
    exact, _ = inner_norm_backward(
        *(each.cpu().double() for each in (gradient.double() @ weight.double(), hidden, gain, statistics)), True
    )

    def error(found: Tensor) -> float:
        return float((found.cpu().double() - exact).norm() / exact.norm())

    in_a_pass, _ = inner_norm_backward(gradient @ weight, hidden, gain, statistics, True)
    assert error(normed_product_backward(*given)[0]) < 0.8 * error(in_a_pass) < 3e-3


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_a_number_passes(device: str) -> None:
    given = backward_of(130, 64, 136, device, DTYPES[device], True)
    given[2][3, 5] = torch.nan
    passed, _ = normed_product_backward(*given)
    assert passed.isnan().nonzero().tolist() == [[3, 5]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("centred", [True, False])
def test_there_may_be_no_rows(centred: bool, device: str) -> None:
    passed, totals = normed_product_backward(*backward_of(0, 64, 136, device, DTYPES[device], centred))
    assert passed.shape == (0, 136)
    assert all(torch.equal(total, torch.zeros_like(total)) for total in totals)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 333, 4096])
def test_the_shapes_of_models_have_the_kernel(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability()[0] not in GENERATIONS:
        pytest.skip("this GPU does not copy tiles")
    monkeypatch.setattr(unit, "inner_norm_backward", fail)
    for dim in (512, 768, 1024):
        normed_product_backward(*backward_of(rows, dim, 4 * dim, "cuda", torch.bfloat16, True))


@pytest.mark.gpu
def test_a_recording_computes_the_same() -> None:
    x, *weights = network(3, 43, 128, 512, "cuda", True, True)
    assert x is not None
    place, gradient = torch.empty_like(x).requires_grad_(), torch.randn_like(x)

    def work(x: Tensor) -> tuple[Tensor, ...]:
        y = run(x, *weights)
        return (y, *torch.autograd.grad(y, [x, *(each for each in weights if each is not None)], gradient))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work(place)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        recorded = work(place)
    for read in (x, -x):
        place.data.copy_(read)
        graph.replay()
        for found, expected in zip(recorded, work(read.detach().requires_grad_()), strict=True):
            close(found, expected.double())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("centred", [True, False])
def test_the_operator_is_what_it_says_to_the_compiler(centred: bool, device: str) -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for width in (200, 100):
        given = backward_of(70, 16, width, device, DTYPES[device], centred)
        torch.library.opcheck(normed_product_backward, given, test_utils=tests, rtol=2e-2, atol=2e-2)
