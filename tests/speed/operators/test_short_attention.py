"""Attention over short sequences against SDPA in fp64: the reference on the CPU, the kernels on a GPU."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.speed.operators.random_bits import keep_mask
from kilolayer.speed.operators.short_attention import can_run_short_attention, short_cross_attention, short_self_attention
from tests.fixtures import formulas

pytestmark = pytest.mark.filterwarnings("default")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = {"cpu": torch.float64, "cuda": torch.bfloat16}
TOLERANCE = {"cpu": 1e-12, "cuda": 2e-2}
close = partial(formulas.close, tolerance=TOLERANCE)


def attention(query: Tensor, key: Tensor, value: Tensor, keys: Tensor | None, causal: bool, head_dim: int) -> Tensor:
    """SDPA in fp64 on [batch, length, heads * head width]."""
    query, key, value = (part.unflatten(-1, (-1, head_dim)).transpose(1, 2) for part in (query, key, value))
    mask = query.new_zeros(query.shape[0], 1, query.shape[2], key.shape[2])
    if keys is not None:
        mask = mask + keys.double()[:, None, None, :]
    if causal:
        mask = mask.masked_fill(~torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril(), -torch.inf)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2).flatten(2)


def padding(batch: int, length: int, dtype: torch.dtype, device: str) -> Tensor:
    bias = torch.zeros(batch, length, dtype=dtype, device=device)
    for row in range(1, batch):
        bias[row, length - row % length :] = -torch.inf if row % length else 0
    return bias


@pytest.mark.matrix(4)
@pytest.mark.parametrize(("length", "head_dim"), list(product([1, 7, 16, 33, 64, 100, 128], [16, 64, 128])))
@pytest.mark.parametrize(("key_heads", "causal", "padded"), [(4, True, True), (4, False, True), (2, True, False)])
@pytest.mark.parametrize("device", DEVICES)
def test_self_attention(length: int, head_dim: int, key_heads: int, causal: bool, padded: bool, device: str) -> None:
    batch, heads, dtype = 5, 4, DTYPES[device]
    packed = torch.randn(batch, length, (heads + 2 * key_heads) * head_dim, device=device, dtype=dtype, requires_grad=True)
    keys = padding(batch, length, dtype, device) if padded else None
    exact = packed.detach().double().requires_grad_()
    sizes = [heads * head_dim, key_heads * head_dim, key_heads * head_dim]
    expected = attention(*exact.split(sizes, dim=-1), keys, causal, head_dim)
    found = short_self_attention(packed, keys, heads, key_heads, causal)
    gradient = torch.randn_like(found)
    found.backward(gradient)
    expected.backward(gradient.double())
    close(found, expected)
    assert packed.grad is not None
    assert exact.grad is not None
    close(packed.grad, exact.grad)


@pytest.mark.parametrize(("queries", "length"), [(1, 1), (9, 30), (64, 17), (128, 128)])
@pytest.mark.parametrize("device", DEVICES)
def test_cross_attention(queries: int, length: int, device: str) -> None:
    batch, heads, key_heads, head_dim, dtype = 3, 4, 2, 32, DTYPES[device]
    query = torch.randn(batch, queries, heads * head_dim, device=device, dtype=dtype, requires_grad=True)
    packed = torch.randn(batch, length, 2 * key_heads * head_dim, device=device, dtype=dtype, requires_grad=True)
    keys = padding(batch, length, dtype, device)
    exact_query, exact = query.detach().double().requires_grad_(), packed.detach().double().requires_grad_()
    expected = attention(exact_query, *exact.chunk(2, dim=-1), keys, False, head_dim)
    found = short_cross_attention(query, packed, keys, heads, key_heads)
    gradient = torch.randn_like(found)
    found.backward(gradient)
    expected.backward(gradient.double())
    for ours, theirs in ((found, expected), (query.grad, exact_query.grad), (packed.grad, exact.grad)):
        assert ours is not None
        assert theirs is not None
        close(ours, theirs)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_that_may_look_nowhere_is_zero(device: str) -> None:
    packed = torch.randn(1, 4, 3 * 16, device=device, dtype=DTYPES[device], requires_grad=True)
    keys = torch.full((1, 4), -torch.inf, device=device, dtype=DTYPES[device])
    found = short_self_attention(packed, keys, 1, 1, True)
    found.sum().backward()
    assert packed.grad is not None
    assert not found.any()
    assert not packed.grad.any()


def test_it_serves_short_sequences_in_half_precision_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kilolayer.speed.operators.kernels.why_no_kernels", lambda: None)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert can_run_short_attention(gpu, torch.bfloat16, 128, 64)
    assert can_run_short_attention(gpu, torch.float16, 1, 16)
    assert not can_run_short_attention(cpu, torch.bfloat16, 128, 64)
    assert not can_run_short_attention(gpu, torch.float32, 128, 64)
    assert not can_run_short_attention(gpu, torch.bfloat16, 129, 64)
    assert not can_run_short_attention(gpu, torch.bfloat16, 128, 48)
    monkeypatch.setattr("kilolayer.speed.operators.kernels.why_no_kernels", lambda: "Triton is not installed")
    assert not can_run_short_attention(gpu, torch.bfloat16, 128, 64)


def dropped_attention(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor | None, causal: bool, head_dim: int, seed: Tensor, p: float
) -> Tensor:
    """The formula in fp64 with the mask multiplied into the weights, for sequences in which every query sees a key."""
    query, key, value = (part.unflatten(-1, (-1, head_dim)).transpose(1, 2) for part in (query, key, value))
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / head_dim**0.5
    if keys is not None:
        scores = scores + keys.double()[:, None, None, :]
    if causal:
        scores = scores + torch.full_like(scores, -torch.inf).triu(1)
    weights = scores.softmax(dim=-1) * keep_mask(seed, scores.shape, p) / (1 - p)
    return torch.einsum("bhqk,bhkd->bqhd", weights, value).flatten(2)


@pytest.mark.matrix(4)
@pytest.mark.parametrize(("length", "head_dim"), [(1, 16), (7, 64), (33, 16), (64, 64), (100, 128), (128, 64)])
@pytest.mark.parametrize(("key_heads", "causal", "padded"), [(4, True, True), (4, False, True), (2, True, False)])
@pytest.mark.parametrize("device", DEVICES)
def test_self_attention_with_dropped_weights(
    length: int, head_dim: int, key_heads: int, causal: bool, padded: bool, device: str
) -> None:
    batch, heads, dtype, seed = 5, 4, DTYPES[device], torch.tensor(-987654321987654321, device=device)
    packed = torch.randn(batch, length, (heads + 2 * key_heads) * head_dim, device=device, dtype=dtype, requires_grad=True)
    keys = padding(batch, length, dtype, device) if padded else None
    exact = packed.detach().double().requires_grad_()
    sizes = [heads * head_dim, key_heads * head_dim, key_heads * head_dim]
    expected = dropped_attention(*exact.split(sizes, dim=-1), keys, causal, head_dim, seed, 0.3)
    found = short_self_attention(packed, keys, heads, key_heads, causal, seed, 0.3)
    gradient = torch.randn_like(found)
    found.backward(gradient)
    expected.backward(gradient.double())
    close(found, expected)
    assert packed.grad is not None
    assert exact.grad is not None
    close(packed.grad, exact.grad)


@pytest.mark.parametrize(("queries", "length"), [(1, 1), (9, 30), (64, 17), (128, 128)])
@pytest.mark.parametrize("device", DEVICES)
def test_cross_attention_with_dropped_weights(queries: int, length: int, device: str) -> None:
    batch, heads, key_heads, head_dim, dtype = 3, 4, 2, 32, DTYPES[device]
    seed = torch.tensor([3], device=device)
    query = torch.randn(batch, queries, heads * head_dim, device=device, dtype=dtype, requires_grad=True)
    packed = torch.randn(batch, length, 2 * key_heads * head_dim, device=device, dtype=dtype, requires_grad=True)
    keys = padding(batch, length, dtype, device)
    exact_query, exact = query.detach().double().requires_grad_(), packed.detach().double().requires_grad_()
    expected = dropped_attention(exact_query, *exact.chunk(2, dim=-1), keys, False, head_dim, seed, 0.3)
    found = short_cross_attention(query, packed, keys, heads, key_heads, seed, 0.3)
    gradient = torch.randn_like(found)
    found.backward(gradient)
    expected.backward(gradient.double())
    for ours, theirs in ((found, expected), (query.grad, exact_query.grad), (packed.grad, exact.grad)):
        assert ours is not None
        assert theirs is not None
        close(ours, theirs)


@pytest.mark.parametrize("device", DEVICES)
def test_the_operators_are_what_they_say_to_the_compiler(device: str) -> None:
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    packed = torch.randn(2, 9, 3 * 4 * 16, device=device, dtype=DTYPES[device], requires_grad=True)
    query, seed = packed.detach()[..., :64].clone().requires_grad_(), torch.tensor(5, device=device)
    for draw in ((), (seed, 0.3)):
        torch.library.opcheck(short_self_attention, (packed, None, 4, 4, True, *draw), test_utils=tests)
        torch.library.opcheck(short_cross_attention, (query, packed[..., :128].detach(), None, 4, 4, *draw), test_utils=tests)
