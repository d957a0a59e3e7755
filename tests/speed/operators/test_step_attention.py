"""Attention of one decoding step against softmax(q k^T) v, written out in fp64 for each hypothesis."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kilolayer.speed.operators.step_attention import can_run_step_attention, step_cross_attention, step_self_attention

pytestmark = pytest.mark.filterwarnings("default")
CASES = [
    pytest.param(device, dtype, tolerance, id=f"{device}-{dtype}", marks=[pytest.mark.gpu] if device == "cuda" else [])
    for device, dtype, tolerance in [
        ("cpu", torch.float64, 1e-12),
        ("cuda", torch.float32, 3e-6),
        ("cuda", torch.float16, 4e-3),
        ("cuda", torch.bfloat16, 3e-2),
    ]
]


def attention(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """[rows, heads, width, head width] to [rows, width, heads * head width], hypothesis by hypothesis, in fp64."""
    rows, heads, width, head_dim = query.shape
    query, keys, values = query.double(), keys.double(), values.double()
    found = query.new_zeros(rows, width, heads, head_dim)
    for row in range(rows):
        for head in range(heads):
            shared = head * keys.shape[1] // heads
            for hypothesis in range(width):
                own = seen[row, 0, hypothesis if seen.shape[2] > 1 else 0]
                weights = (keys[row, shared, own] @ query[row, head, hypothesis] / head_dim**0.5).softmax(dim=0)
                found[row, hypothesis, head] = weights @ values[row, shared, own]
    return found.flatten(2)


@pytest.mark.parametrize(
    ("width", "heads", "key_heads", "head_dim", "steps", "step"),
    [(5, 4, 4, 64, 64, 40), (5, 4, 2, 16, 32, 0), (3, 4, 1, 32, 32, 31), (1, 2, 2, 128, 64, 63), (12, 4, 1, 64, 32, 20)],
)
@pytest.mark.parametrize(("device", "dtype", "tolerance"), CASES)
def test_a_hypothesis_sees_its_own_past_and_itself(
    width: int,
    heads: int,
    key_heads: int,
    head_dim: int,
    steps: int,
    step: int,
    device: str,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    rows, entries = 3, steps * width
    packed = torch.randn(rows, width, (heads + 2 * key_heads) * head_dim, dtype=dtype, device=device)
    sizes = [heads * head_dim, key_heads * head_dim, key_heads * head_dim]
    query, key, value = (part.unflatten(-1, (-1, head_dim)).transpose(1, 2) for part in packed.split(sizes, dim=-1))
    kept = torch.randn(2, rows, key_heads, entries, head_dim, dtype=dtype, device=device)
    kept[:, :, :, step * width :] = torch.nan  # what was never written must not matter
    past = step * width + torch.arange(width, device=device)
    seen = torch.rand(rows, width, entries, device=device) < 0.4
    seen[:, :, step * width :] = False
    seen.scatter_(2, past[None, :, None].expand(rows, -1, -1), True)
    expected = kept.clone()
    expected[0, :, :, past], expected[1, :, :, past] = key, value
    if device == "cpu":
        kept.nan_to_num_()  # SDPA multiplies by what it does not see
    keys, values = kept
    found = step_self_attention(query, key, value, keys, values, seen[:, None], past)
    close(found, attention(query, *expected, seen[:, None]), tolerance)
    assert torch.equal(keys[:, :, past], key)
    assert torch.equal(values[:, :, past], value)
    assert torch.equal(keys[:, :, : step * width], expected[0, :, :, : step * width])


@pytest.mark.parametrize(
    ("width", "heads", "key_heads", "head_dim", "source"), [(5, 4, 4, 64, 32), (5, 4, 2, 32, 96), (1, 4, 1, 128, 64)]
)
@pytest.mark.parametrize(("device", "dtype", "tolerance"), CASES)
def test_all_hypotheses_see_the_source_without_its_padding(
    width: int, heads: int, key_heads: int, head_dim: int, source: int, device: str, dtype: torch.dtype, tolerance: float
) -> None:
    rows = 4
    query = torch.randn(rows, width, heads * head_dim, dtype=dtype, device=device).unflatten(-1, (heads, -1)).transpose(1, 2)
    key, value = torch.randn(2, rows, key_heads, source, head_dim, dtype=dtype, device=device)
    real = torch.arange(source, device=device) < torch.tensor([[source], [1], [7], [source - 1]], device=device)
    found = step_cross_attention(query, key, value, real[:, None, None])
    close(found, attention(query, key, value, real[:, None, None]), tolerance)


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.is_contiguous()
    assert float((found.double() - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


def test_it_serves_few_hypotheses_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kilolayer.speed.operators.kernels.why_no_kernels", lambda: None)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert can_run_step_attention(gpu, torch.bfloat16, 5, 64)
    assert can_run_step_attention(gpu, torch.float32, 64, 16)
    assert not can_run_step_attention(cpu, torch.float32, 5, 64)
    assert not can_run_step_attention(gpu, torch.float64, 5, 64)
    assert not can_run_step_attention(gpu, torch.bfloat16, 65, 64)
    assert not can_run_step_attention(gpu, torch.bfloat16, 5, 48)
    monkeypatch.setattr("kilolayer.speed.operators.kernels.why_no_kernels", lambda: "Triton is not installed")
    assert not can_run_step_attention(gpu, torch.bfloat16, 5, 64)
