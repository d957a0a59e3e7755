"""Products of few rows in fp32 against the same products in fp64."""

from __future__ import annotations

import pytest
import torch

from kilolayer.layers.few_rows import few_rows_product, serves

pytestmark = pytest.mark.filterwarnings("default")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 64), (33, 512, 1536), (320, 512, 2048), (512, 1024, 512)])
@pytest.mark.parametrize("biased", [False, True])
@torch.no_grad()
def test_the_product_is_that_of_fp32(rows: int, inputs: int, outputs: int, biased: bool, device: str) -> None:
    x, weight = torch.randn(rows, 1, inputs, device=device), torch.randn(outputs, inputs, device=device)
    bias = torch.randn(outputs, device=device) if biased else None
    expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    assert device == "cpu" or serves(x, weight)
    found = few_rows_product(x, weight, bias)
    assert found.shape == (rows, 1, outputs)
    # Of products that are about 1, and their sum about sqrt(inputs): far below what tensor cores would round away.
    assert float((found.double() - expected).abs().max()) < 2e-6 * inputs**0.5 * 4


def test_it_serves_few_rows_without_gradients_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kilolayer.layers.kernels.why_no_kernels", lambda: None)

    class Gpu:
        """What is asked of a tensor, on a machine without one."""

        device, dtype = torch.device("cuda"), torch.float32

        def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
            self.shape, self.dtype = shape, dtype

        def numel(self) -> int:
            return torch.Size(self.shape).numel()

        def is_contiguous(self) -> bool:
            return True

    def asked(rows: int, inputs: int, outputs: int, dtype: torch.dtype = torch.float32) -> bool:
        return serves(Gpu(rows, inputs), Gpu(outputs, inputs, dtype=dtype))  # pyright: ignore[reportArgumentType]

    assert not asked(320, 512, 512)
    with torch.no_grad():
        assert asked(320, 512, 512)
        assert not asked(513, 512, 512)
        assert not asked(320, 2048, 512)
        assert not asked(320, 512, 100)
        assert not asked(320, 512, 512, torch.bfloat16)
        assert not serves(torch.randn(3, 64), torch.randn(64, 64))
