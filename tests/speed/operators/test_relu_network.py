"""The feed-forward network as one unit against a plain one in fp64: the formulas on the CPU, the kernel on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.speed.operators import kernels
from kilolayer.speed.operators import relu_network as unit
from kilolayer.speed.operators.random_bits import keep_mask
from kilolayer.speed.operators.relu_network import masked_product, relu_network
from kilolayer.speed.operators.relu_product import relu_backward, relu_dropout_product, relu_product
from tests.fixtures import formulas

pytestmark = pytest.mark.filterwarnings("default")  # the compiler warns about itself
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-2}
close = partial(formulas.close, tolerance=TOLERANCE)
# The width of 100 is no multiple of 16 bytes; the others are whole tiles of the kernel or not.
SHAPES = [(1, 1, 16, 64), (3, 43, 32, 72), (1, 64, 64, 100), (5, 13, 64, 256), (7, 101, 128, 1000), (2, 333, 72, 4096)]


def network(batch: int, length: int, dim: int, width: int, device: str) -> list[Tensor]:
    """x, W_1, b_1, W_2 and b_2, of sizes that keep all sums near 1."""
    shapes = {(batch, length, dim): 1.0, (width, dim): dim**-0.5, (width,): 1.0, (dim, width): width**-0.5, (dim,): 1.0}
    return [(torch.randn(shape) * size).to(device, DTYPES[device]).requires_grad_() for shape, size in shapes.items()]


def factors(rows: int, dim: int, width: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """A gradient, W_2 and what the ReLU gave."""
    given = torch.randn(rows, dim), torch.randn(dim, width) * dim**-0.5, torch.randn(rows, width).relu()
    gradient, weight, hidden = (each.to(device, DTYPES[device]) for each in given)
    return gradient, weight, hidden


def misaligned(given: Tensor) -> Tensor:
    """The same numbers, one further in memory."""
    return torch.cat([given.new_zeros(1), given.flatten()])[1:].view(given.shape)


def assert_exact(given: list[Tensor], biased: bool, transposed: bool = False, p: float = 0.0) -> None:
    """The network and all its gradients are those of fp64."""
    exact = [each.detach().double().requires_grad_() for each in given]
    seed = torch.tensor(99, device=given[0].device)
    found = relu_network(*given[:4], given[4] if biased else None, seed, p)
    # The second product reads what was rounded; where fp64 finds a sum on the other side of 0, that says what passes.
    hidden = relu_dropout_product(*given[:3], seed, p).detach()
    assert torch.equal(hidden > 0, (relu_product(*given[:3]) > 0) & keep_mask(seed, hidden.shape, p))
    read = F.linear(*exact[:3]) * (hidden > 0) / (1 - p)
    expected = F.linear(read + (hidden.double() - read).detach(), exact[3], exact[4] if biased else None)
    gradient = torch.randn_like(found)
    gradient = gradient.mT.contiguous().mT if transposed else gradient
    found.backward(gradient)
    expected.backward(gradient.double())
    close(found, expected)
    for ours, theirs in zip(given[: 4 + biased], exact, strict=False):
        close(ours.grad, theirs.grad)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("biased", "transposed"), [(False, False), (True, True)])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_network_and_gradients(shape: tuple[int, int, int, int], p: float, biased: bool, transposed: bool, device: str) -> None:
    assert_exact(network(*shape, device), biased, transposed, p)


@pytest.mark.parametrize("frozen", range(4))
def test_what_is_frozen_gets_no_gradient_and_the_others_their_own(frozen: int) -> None:
    torch.manual_seed(0)
    given = network(2, 5, 16, 48, "cpu")
    given[frozen].requires_grad_(False)
    plain = [each.detach().clone().requires_grad_(each.requires_grad) for each in given]
    relu_network(*given).square().sum().backward()
    F.linear(F.linear(*plain[:3]).relu(), *plain[3:]).square().sum().backward()
    assert given[frozen].grad is None
    for ours, theirs in zip(given, plain, strict=True):
        if theirs.grad is not None:
            close(ours.grad, theirs.grad.double())


def test_a_second_derivative_is_refused() -> None:
    given = network(2, 5, 16, 48, "cpu")
    (first,) = torch.autograd.grad(relu_network(*given).square().sum(), given[3], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.matrix(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "dim", "width"), [(1, 8, 8), (129, 64, 136), (300, 200, 1000), (1000, 512, 2048)])
@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_the_product_passes_where_the_relu_let_through(rows: int, dim: int, width: int, scale: float, device: str) -> None:
    gradient, weight, hidden = factors(rows, dim, width, device)
    hidden[0, :2] = torch.tensor([torch.nan, -0.0])
    passed, total = masked_product(gradient, weight, hidden, scale)
    expected = torch.where(hidden <= 0, 0.0, scale * gradient.double() @ weight.double())
    assert torch.all(passed[hidden <= 0] == 0)
    close(passed, expected)
    close(total, expected.sum(dim=0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 130, 20_001, 70_000])
def test_the_bias_gets_the_sum_over_all_rows(rows: int, device: str) -> None:
    hidden = torch.randn(rows, 64, device=device, dtype=DTYPES[device]).relu()
    # W is the unit matrix: each number is a 1 where it passes.
    passed, total = masked_product(torch.ones_like(hidden), torch.eye(64).to(hidden), hidden)
    assert torch.equal(passed, (hidden > 0).to(hidden.dtype))
    assert torch.equal(total, (hidden > 0).sum(dim=0).to(hidden.dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_there_may_be_no_rows(device: str) -> None:
    passed, total = masked_product(*factors(0, 64, 136, device))
    assert passed.shape == (0, 136)
    assert torch.equal(total, torch.zeros_like(total))


def fail(*_: Any) -> NoReturn:
    pytest.fail("not to be called")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 333, 4096])
def test_the_shapes_of_models_have_the_kernel(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability()[0] not in unit.GENERATIONS:
        pytest.skip("this GPU does not copy tiles")
    monkeypatch.setattr(unit, "relu_backward", fail)
    for dim in (512, 768, 1024):
        masked_product(*factors(rows, dim, 4 * dim, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_an_older_gpu_has_the_product_and_a_pass(shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (8, 9))
    monkeypatch.setattr("kilolayer.speed.operators.masked_product_kernel.multiply_and_mask", fail)
    assert_exact(network(*shape, "cuda"), True, p=0.3)


@pytest.mark.gpu
@pytest.mark.parametrize("moved", range(3))
def test_views_may_begin_anywhere(moved: int) -> None:
    given = list(factors(43, 64, 136, "cuda"))
    expected = relu_backward(given[0] @ given[1], given[2])
    given[moved] = misaligned(given[moved])
    for found, each in zip(masked_product(*given), expected, strict=True):
        close(found, each.double())
    assert_exact([misaligned(each.detach()).requires_grad_() for each in network(2, 7, 64, 128, "cuda")], True)


def test_the_kernel_reads_what_begins_at_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient, weight, hidden = (each.bfloat16() for each in factors(43, 64, 136, "cpu"))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    assert unit._supports_tile_copies(gradient, weight, hidden)
    assert not unit._supports_tile_copies(misaligned(gradient), weight, hidden)
    assert not unit._supports_tile_copies(gradient, misaligned(weight), hidden)
    assert not unit._supports_tile_copies(gradient, weight, misaligned(hidden))
    assert not unit._supports_tile_copies(gradient[:0], weight, hidden[:0])
    for dim, width in ((60, 136), (64, 132)):
        assert not unit._supports_tile_copies(*(each.bfloat16() for each in factors(43, dim, width, "cpu")))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (8, 9))
    assert not unit._supports_tile_copies(gradient, weight, hidden)


@pytest.mark.gpu
def test_a_recording_computes_the_same() -> None:
    *weights, last_bias = network(3, 43, 128, 512, "cuda")
    place, gradient = torch.empty_like(weights[0]).requires_grad_(), torch.randn_like(weights[0])

    def work(x: Tensor) -> tuple[Tensor, ...]:
        y = relu_network(x, *weights[1:], last_bias)
        return (y, *torch.autograd.grad(y, [x, *weights[1:], last_bias], gradient))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work(place)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        recorded = work(place)
    for x in (weights[0], -weights[0]):
        place.data.copy_(x)
        graph.replay()
        for found, expected in zip(recorded, work(x.detach().requires_grad_()), strict=True):
            close(found, expected.double())


@pytest.mark.parametrize("device", DEVICES)
def test_the_operator_is_what_it_says_to_the_compiler(device: str) -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for width in (200, 100):
        for scale in ((), (1.5,)):
            given = (*factors(70, 16, width, device), *scale)
            torch.library.opcheck(masked_product, given, test_utils=tests, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("left", ["relu_network", "relu_product"])
@pytest.mark.gpu
def test_it_can_be_left_out(left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability()[0] not in unit.GENERATIONS:
        pytest.skip("this GPU does not copy tiles")
    calls: list[str] = []
    monkeypatch.setattr(unit, "relu_backward", lambda *given: calls.append("pass") or relu_backward(*given))
    with kernels.disabled(left):
        masked_product(*factors(129, 64, 136, "cuda"))
    assert calls == (["pass"] if left == "relu_network" else [])
