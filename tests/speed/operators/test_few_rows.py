"""Products of few rows in fp32 against the same products in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.layers.embedding import Embedding, VocabularyProjection
from kilolayer.speed.fast import fast_form
from kilolayer.speed.operators.few_rows import can_run_few_rows, few_rows_product, linear

pytestmark = pytest.mark.filterwarnings("default")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def error(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> float:
    """The largest error, of each row of x and of the weights in their own measure; shapes as in `few_rows_product`."""
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    measure = x.double().norm(dim=-1, keepdim=True) * weight.double().norm(dim=-1)
    return float(((found.double() - expected) / measure).abs().max())


@pytest.mark.matrix(4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(1, 64, 64), (33, 512, 1536), (320, 512, 2048), (512, 1024, 512), (320, 2048, 512), (7, 1600, 100), (320, 512, 8003)],
)
@pytest.mark.parametrize("biased", [False, True])
@torch.no_grad()
def test_the_product_is_that_of_fp32(rows: int, inputs: int, outputs: int, biased: bool, device: str) -> None:
    x, weight = torch.randn(rows, 1, inputs, device=device), torch.randn(outputs, inputs, device=device)
    bias = torch.randn(outputs, device=device) if biased else None
    assert device == "cpu" or can_run_few_rows(x, weight)
    found = few_rows_product(x, weight, bias)
    assert found.shape == (rows, 1, outputs)
    # The library's own fp32 may be set to less on a GPU, so what it finds is not the measure there.
    plain = F.linear(x.cpu(), weight.cpu(), None if bias is None else bias.cpu()).to(device)
    one_rounding = 2**-24 / inputs**0.5
    assert error(found, x, weight, bias) < 2 * error(plain, x, weight, bias) + one_rounding
    assert torch.equal(found, few_rows_product(x, weight, bias))


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize(("inputs", "outputs"), [(512, 512), (2048, 512)])
@torch.no_grad()
def test_rows_and_columns_of_any_size_keep_their_precision(inputs: int, outputs: int, device: str) -> None:
    x, weight = torch.randn(320, inputs), torch.randn(outputs, inputs)
    x *= torch.logspace(-4, 4, 320)[:, None]
    weight *= torch.logspace(4, -4, outputs)[:, None]
    mixed = torch.randn(320, inputs) * 10 ** torch.empty(320, inputs).uniform_(-4, 4)
    for rows in (x, mixed):
        found = few_rows_product(rows.to(device), weight.to(device), None).cpu()
        assert error(found, rows, weight) < 2 * error(F.linear(rows, weight), rows, weight)


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize(("inputs", "outputs"), [(512, 512), (2048, 512), (512, 8003)])
@torch.no_grad()
def test_what_is_not_finite_stays_so_in_its_row_alone(inputs: int, outputs: int, device: str) -> None:
    x, weight = torch.randn(320, inputs, device=device), torch.randn(outputs, inputs, device=device)
    x[3, 5], x[100, 7], x[319, inputs - 1] = float("inf"), float("nan"), -float("inf")
    found = few_rows_product(x, weight, None).cpu()
    broken = torch.zeros(320, dtype=torch.bool)
    broken[[3, 100, 319]] = True
    assert not found[broken].isfinite().any()
    assert found[100].isnan().all()
    assert found[~broken].isfinite().all()


@pytest.mark.gpu
@torch.no_grad()
def test_the_scores_of_a_vocabulary_are_such_products(monkeypatch: pytest.MonkeyPatch) -> None:
    served = []
    monkeypatch.setattr("kilolayer.speed.operators.few_rows.few_rows_product", lambda x, *_: served.append(x.shape))
    states = torch.randn(320, 1, 64, device="cuda")
    fast_form(Embedding(100, 64, None).cuda()).scores(states)
    fast_form(VocabularyProjection(100, 64).cuda())(states)
    assert served == [states.shape] * 2


def test_where_it_does_not_serve_gradients_pass() -> None:
    x, weight, bias = torch.randn(3, 64), torch.randn(8, 64, requires_grad=True), torch.randn(8)
    out = linear(x, weight, bias)
    out.sum().backward()
    assert torch.equal(out, F.linear(x, weight, bias))
    torch.testing.assert_close(weight.grad, x.sum(0).expand(8, 64))


def test_it_serves_few_rows_without_gradients_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kilolayer.speed.operators.kernels.why_no_kernels", lambda: None)

    class Gpu:
        """What is asked of a tensor, on a machine without one."""

        device, dtype = torch.device("cuda"), torch.float32

        def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
            self.shape, self.dtype = shape, dtype

        def numel(self) -> int:
            return torch.Size(self.shape).numel()

        def is_contiguous(self) -> bool:
            return True

    def is_supported(rows: int, inputs: int, outputs: int, dtype: torch.dtype = torch.float32) -> bool:
        return can_run_few_rows(Gpu(rows, inputs), Gpu(outputs, inputs, dtype=dtype))  # pyright: ignore[reportArgumentType]

    assert not is_supported(320, 512, 512)
    with torch.no_grad():
        assert is_supported(320, 512, 512)
        assert is_supported(320, 2048, 512)
        assert is_supported(320, 512, 8003)
        assert not is_supported(513, 512, 512)
        assert not is_supported(0, 512, 512)
        assert not is_supported(320, 100, 512)
        assert not is_supported(320, 512, 512, torch.bfloat16)
        assert not can_run_few_rows(torch.randn(3, 64), torch.randn(64, 64))
