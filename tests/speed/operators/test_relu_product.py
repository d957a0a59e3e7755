"""The fused product against a plain one in fp64: the formulas on the CPU, cuBLAS and the kernel on a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from kilolayer.speed.operators.random_bits import keep_mask
from kilolayer.speed.operators.relu_product import (
    can_fuse_relu_product,
    normed_relu_product,
    relu_backward,
    relu_dropout_product,
    relu_product,
)
from tests.fixtures import formulas

pytestmark = pytest.mark.filterwarnings("default")  # the compiler warns about itself
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-2}
close = partial(formulas.close, tolerance=TOLERANCE)


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    ("batch", "length", "inputs", "outputs"),
    [(1, 1, 16, 64), (3, 43, 32, 72), (1, 64, 64, 100), (5, 13, 64, 256), (7, 101, 128, 1000), (2, 333, 64, 4096)],
)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_product_and_gradients(batch: int, length: int, inputs: int, outputs: int, transposed: bool, device: str) -> None:
    torch.manual_seed(outputs)
    shapes = [(batch, length, inputs), (outputs, inputs), (outputs,)]
    given = [torch.randn(shape, device=device, dtype=DTYPES[device], requires_grad=True) for shape in shapes]
    exact = [each.detach().double().requires_grad_() for each in given]
    found, before = relu_product(*given), F.linear(*exact)
    gradient = torch.randn(batch, outputs, length, device=device, dtype=found.dtype).mT
    gradient = gradient if transposed else gradient.contiguous()
    found.backward(gradient)
    # Where fp64 finds a sum on the other side of 0, the gradient passes as the operator's own output says.
    (before * (found > 0)).backward(gradient.double())
    close(found, before.relu())
    for ours, theirs in zip(given, exact, strict=True):
        close(ours.grad, theirs.grad)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 16, 64), (43, 32, 96), (7, 64, 1000), (333, 64, 2048)])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_product_norm_and_gradients(rows: int, inputs: int, outputs: int, p: float, centred: bool, device: str) -> None:
    seed = torch.tensor([1 << 40], device=device)
    shapes = [(rows, inputs), (outputs, inputs), (outputs,)]
    given = [torch.randn(shape, device=device, dtype=DTYPES[device], requires_grad=True) for shape in shapes]
    given += [torch.randn(outputs, device=device, requires_grad=True) for _ in range(1 + centred)]
    exact = [each.detach().double().requires_grad_() for each in given]
    found, hidden, _ = normed_relu_product(*given[:4], given[4] if centred else None, 1e-3, seed, p)
    # What the norm reads, as rounded; where fp64 finds a sum on the other side of 0, the gradient passes as the output says.
    before = F.linear(*exact[:3])
    read = before * (hidden > 0) / (1 - p)
    read = read + (hidden.double() - read).detach()
    norm = F.layer_norm if centred else F.rms_norm
    expected = norm(read, (outputs,), *exact[3:], eps=1e-3)
    gradient = torch.randn_like(found)
    found.backward(gradient)
    expected.backward(gradient.double())
    assert torch.equal(hidden, relu_dropout_product(*given[:3], seed, p))
    assert torch.equal(hidden > 0, (relu_product(*given[:3]) > 0) & keep_mask(seed, hidden.shape, p))
    close(found, expected)
    for ours, theirs in zip(given, exact, strict=True):
        close(ours.grad, theirs.grad)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 130, 20_001])
def test_the_bias_gets_the_sum_over_all_rows(rows: int, device: str) -> None:
    hidden = torch.randn(rows, 96, device=device, dtype=DTYPES[device]).relu()
    passed, total = relu_backward(torch.ones_like(hidden), hidden)
    assert torch.equal(passed, (hidden > 0).to(hidden.dtype))
    assert torch.equal(total, (hidden > 0).sum(dim=0).to(hidden.dtype))
    passed, total = relu_backward(torch.ones_like(hidden), hidden, 2.0)
    assert torch.equal(passed, 2 * (hidden > 0).to(hidden.dtype))
    assert torch.equal(total, (2 * (hidden > 0).sum(dim=0)).to(hidden.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_the_operators_are_what_they_say_to_the_compiler(device: str) -> None:
    x, weight = (torch.randn(*shape, device=device, dtype=DTYPES[device]) for shape in ((2, 70, 16), (24, 16)))
    bias = torch.randn(24, device=device, dtype=x.dtype)
    torch.library.opcheck(relu_product, tuple(each.requires_grad_() for each in (x, weight, bias)), rtol=2e-2, atol=2e-2)
    norm = [torch.randn(24, device=device, requires_grad=True) for _ in range(2)]
    torch.library.opcheck(normed_relu_product, (x, weight, bias, *norm, 1e-3), rtol=2e-2, atol=2e-2)
    torch.library.opcheck(relu_backward, (torch.randn(70, 24).to(bias), torch.randn(70, 24).to(bias)))
    draw = (torch.tensor(5, device=device), 0.3)
    torch.library.opcheck(relu_dropout_product, (x, weight, bias, *draw), rtol=2e-2, atol=2e-2)
    torch.library.opcheck(normed_relu_product, (x, weight, bias, *norm, 1e-3, *draw), rtol=2e-2, atol=2e-2)
    torch.library.opcheck(relu_backward, (torch.randn(70, 24).to(bias), torch.randn(70, 24).to(bias), 1.5))


def test_a_compiled_layer_can_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr("kilolayer.speed.operators.kernels.why_no_kernels", lambda: "Triton is not installed")
    asked = (torch.device("cuda"), torch.bfloat16)
    ask = torch.compile(lambda x: x if can_fuse_relu_product(*asked) else -x, backend="eager", fullgraph=True)
    assert ask(torch.ones(1)) == -1


def test_it_serves_half_precision_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kilolayer.speed.operators.kernels.why_no_kernels", lambda: None)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert can_fuse_relu_product(gpu, torch.bfloat16)
    assert can_fuse_relu_product(gpu, torch.float16)
    assert not can_fuse_relu_product(cpu, torch.bfloat16)
    assert not can_fuse_relu_product(gpu, torch.float32)
    monkeypatch.setattr("kilolayer.speed.operators.kernels.why_no_kernels", lambda: "Triton is not installed")
    assert not can_fuse_relu_product(gpu, torch.bfloat16)


@pytest.mark.parametrize(("batch", "length", "inputs", "outputs"), [(1, 1, 16, 64), (3, 43, 32, 72), (7, 101, 128, 1000)])
@pytest.mark.parametrize("device", DEVICES)
def test_dropout_behind_the_relu(batch: int, length: int, inputs: int, outputs: int, device: str) -> None:
    torch.manual_seed(outputs)
    shapes, seed, p = [(batch, length, inputs), (outputs, inputs), (outputs,)], torch.tensor(-11, device=device), 0.3
    given = [torch.randn(shape, device=device, dtype=DTYPES[device], requires_grad=True) for shape in shapes]
    exact = [each.detach().double().requires_grad_() for each in given]
    found, before = relu_dropout_product(*given, seed, p), F.linear(*exact)
    kept = keep_mask(seed, before.shape, p)
    assert torch.equal(found > 0, kept & (relu_product(*given) > 0))
    gradient = torch.randn_like(found)
    found.backward(gradient)
    # Where fp64 finds a sum on the other side of 0, the gradient passes as the operator's own output says.
    (before * (found > 0) / (1 - p)).backward(gradient.double())
    close(found, before.relu() * kept / (1 - p))
    for ours, theirs in zip(given, exact, strict=True):
        close(ours.grad, theirs.grad)
