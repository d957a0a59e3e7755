"""Queries, keys and values of one product against a plain one in fp64: the formulas on the CPU, the kernel on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.operators.heads_product import can_fuse_heads_product, heads_product, join_heads

pytestmark = pytest.mark.filterwarnings("default")  # the compiler warns about itself
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = {"cpu": torch.float64, "cuda": torch.bfloat16}
TOLERANCE = {"cpu": 1e-12, "cuda": 1e-2}
# The axes batch, heads, length and head width in the order of memory, the slowest first.
ORDERS = ["BLHD", "BHLD", "LBHD", "HBLD", "DBHL"]


def close(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None
    assert expected is not None
    assert found.shape == expected.shape
    error = float((found.detach().double() - expected.detach()).abs().max())
    assert error <= TOLERANCE[found.device.type] * max(1.0, float(expected.detach().abs().max()))


def laid_out(x_BHLD: Tensor, order: str) -> Tensor:
    """The same values, in this order in memory."""
    axes = ["BHLD".index(axis) for axis in order]
    return x_BHLD.permute(axes).contiguous().permute([axes.index(axis) for axis in range(4)])


def random_factors(batch: int, length: int, inputs: int, heads: tuple[int, ...], head_dim: int, device: str) -> list[Tensor]:
    outputs = sum(heads) * head_dim
    shapes = [(batch, length, inputs), (outputs, inputs), (outputs,)]
    return [torch.randn(shape, device=device, dtype=DTYPES[device], requires_grad=True) for shape in shapes]


def plain(x: Tensor, weight: Tensor, bias: Tensor, rows: list[int], head_dim: int) -> list[Tensor]:
    parts = zip(weight.split(rows), bias.split(rows), strict=True)
    return [F.linear(x, *part).view(*x.shape[:2], -1, head_dim).transpose(1, 2) for part in parts]


SIZES = [
    (1, 1, 16, (1, 1, 1), 16),
    (3, 43, 32, (4, 4, 4), 16),
    (2, 129, 64, (8, 2, 2), 32),
    (5, 64, 48, (3, 3), 64),
    (2, 200, 64, (12, 12, 12), 64),
    (1, 333, 32, (5, 1, 1), 80),
]


@pytest.mark.parametrize(("batch", "length", "inputs", "heads", "head_dim"), SIZES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("device", DEVICES)
def test_parts_and_gradients(
    batch: int, length: int, inputs: int, heads: tuple[int, ...], head_dim: int, order: str, device: str
) -> None:
    given = random_factors(batch, length, inputs, heads, head_dim, device)
    exact = [each.detach().double().requires_grad_() for each in given]
    rows = [head_dim * each for each in heads]
    found, expected = heads_product(*given, rows, head_dim), plain(*exact, rows, head_dim)
    gradients = [laid_out(torch.randn_like(part), order) for part in found]
    torch.autograd.backward(found, gradients)
    torch.autograd.backward(expected, [gradient.double() for gradient in gradients])
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs)
    for ours, theirs in zip(given, exact, strict=True):
        close(ours.grad, theirs.grad)


def test_gradients_are_those_of_finite_differences() -> None:
    given = random_factors(2, 5, 6, (2, 1, 1), 4, "cpu")
    assert torch.autograd.gradcheck(lambda *factors: heads_product(*factors, [8, 4, 4], 4), given)


@pytest.mark.parametrize(("batch", "length", "inputs", "heads", "head_dim"), SIZES)
@pytest.mark.parametrize("device", DEVICES)
def test_each_part_has_an_order_of_its_own(
    batch: int, length: int, inputs: int, heads: tuple[int, ...], head_dim: int, device: str
) -> None:
    values = [torch.randn(batch, each, length, head_dim, device=device, dtype=DTYPES[device]) for each in heads]
    joined, total = join_heads([laid_out(value, order) for value, order in zip(values, ORDERS[::2], strict=False)])
    rows = [[value[b, :, position].flatten() for value in values] for b in range(batch) for position in range(length)]
    expected = torch.stack([torch.cat(row) for row in rows])
    assert torch.equal(joined, expected)
    close(total, expected.double().sum(dim=0))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_that_repeat_or_lie_apart_in_memory(device: str) -> None:
    whole = torch.randn(3, 40, 3, 4, 32, device=device, dtype=DTYPES[device])
    apart = [part.transpose(1, 2) for part in whole[..., 8:24].unbind(2)]
    joined, total = join_heads(apart)
    assert torch.equal(joined, whole[..., 8:24].flatten(2).flatten(0, 1))
    close(total, joined.double().sum(dim=0))
    ones = torch.ones((), device=device, dtype=whole.dtype)
    joined, total = join_heads([ones.expand(3, heads, 40, 16) for heads in (4, 2, 2)])
    assert torch.equal(joined, torch.ones_like(joined))
    assert torch.equal(total, torch.full_like(total, 120))


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 65), (21, 953)])
@pytest.mark.parametrize("device", DEVICES)
def test_the_bias_gets_the_sum_over_all_rows(batch: int, length: int, device: str) -> None:
    parts = [torch.randint(0, 2, (batch, heads, length, 16), device=device).bfloat16() for heads in (4, 1, 1)]
    joined, total = join_heads(parts)
    assert torch.equal(total, (joined > 0).sum(dim=0).bfloat16())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [(4, 4, 4), (4, 2)])
def test_the_operator_is_what_it_says_to_the_compiler(heads: tuple[int, ...], device: str) -> None:
    parts = [torch.randn(2, 70, each, 16, device=device, dtype=DTYPES[device]).transpose(1, 2) for each in heads]
    torch.library.opcheck(join_heads, (parts,), rtol=2e-2, atol=2e-2)


def attend(product: Any, *given: Tensor) -> Tensor:
    query, key, value = product(*given, [64, 32, 32], 16)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize(("device", "backend"), [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)])
def test_compiled_with_attention_behind_it(device: str, backend: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(partial(attend, heads_product), fullgraph=True, dynamic=True, backend=backend)
    for batch, length in ((3, 160), (2, 37)):
        x, *factors = random_factors(batch, length, 32, (4, 2, 2), 16, device)
        # Scores near 1: those of a saturated softmax differ by a tenth in bf16, with any kernel.
        given = [x, *((0.2 * factor).detach().requires_grad_() for factor in factors)]
        exact = [each.detach().double().requires_grad_() for each in given]
        for run, factors in ((compiled, given), (partial(attend, plain), exact)):
            run(*factors).square().sum().backward()
        for ours, theirs in zip(given, exact, strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            difference = (ours.grad.double() - theirs.grad).norm() / theirs.grad.norm()
            assert float(difference) < TOLERANCE[device]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
def test_a_recording_computes_anew() -> None:
    parts = [torch.randn(2, 300, heads, 64, device="cuda").bfloat16().transpose(1, 2) for heads in (4, 2, 2)]
    join_heads(parts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        joined, total = join_heads(parts)
    for part in parts:
        part.normal_()
    graph.replay()
    assert torch.equal(joined, torch.cat([part.transpose(1, 2).flatten(2) for part in parts], dim=-1).flatten(0, 1))
    close(total, joined.double().sum(dim=0))


def test_a_compiled_layer_can_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr("kilolayer.operators.kernels.why_no_kernels", lambda: "Triton is not installed")
    asked = (torch.device("cuda"), torch.bfloat16, 64)
    ask = torch.compile(lambda x: x if can_fuse_heads_product(*asked) else -x, backend="eager", fullgraph=True)
    assert ask(torch.ones(1)) == -1


def test_it_serves_half_precision_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kilolayer.operators.kernels.why_no_kernels", lambda: None)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert can_fuse_heads_product(gpu, torch.bfloat16, 64)
    assert can_fuse_heads_product(gpu, torch.float16, 80)
    assert not can_fuse_heads_product(cpu, torch.bfloat16, 64)
    assert not can_fuse_heads_product(gpu, torch.float32, 64)
    assert not can_fuse_heads_product(gpu, torch.bfloat16, 72)
    monkeypatch.setattr("kilolayer.operators.kernels.why_no_kernels", lambda: "Triton is not installed")
    assert not can_fuse_heads_product(gpu, torch.bfloat16, 64)
