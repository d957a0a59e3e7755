"""Attention against loops in fp64: masks, rotation, grouped keys, and a cache."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kilolayer.layers.attention import Attention, CrossAttention, SelfAttention
from kilolayer.layers.cache import LayerCache
from kilolayer.layers.initialize import initialize
from kilolayer.layers.mask import Mask, causal_grid
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.position import Rotary
from kilolayer.recipes.base import Plan

BATCH, LENGTH, SOURCE, DIM = 2, 5, 4, 12
ALLOWED = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.6
ALLOWED |= torch.eye(LENGTH, dtype=torch.bool)
BIAS = torch.randn(1, 6, LENGTH, LENGTH, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
MASKS = {
    "none": (Mask(), torch.zeros(LENGTH, LENGTH)),
    "causal": (
        Mask(causal=True),
        torch.zeros(LENGTH, LENGTH).masked_fill(~causal_grid(5, 5, 0, torch.device("cpu")), -math.inf),
    ),
    "some keys": (Mask(values=ALLOWED), torch.zeros(BATCH, 1, LENGTH, LENGTH).masked_fill(~ALLOWED, -math.inf)),
    "bias": (Mask(values=BIAS), BIAS),
}


def make(kind: type[Attention], **options: Any) -> Any:
    f = kind(LayerOptions(dim=DIM, heads=6, ffn_dim=8, **options), Plan()).double()
    initialize(f, 0)
    return f.eval()


def states(length: int, seed: int) -> Tensor:
    return torch.randn(BATCH, length, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def turned(x: Tensor, position: int) -> Tensor:
    """Each pair (x_i, x_{i + half}) as a complex number, multiplied by e^(i angle)."""
    half = len(x) // 2
    angle = position * 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    product = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([product.real, product.imag])


def by_loops(f: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, rotates: bool) -> Tensor:
    """query [batch, length, dim]; key and value [batch, keys, key heads * head_dim]; bias broadcasts to the logits."""
    width, out = f.head_dim, torch.zeros_like(query)
    bias = bias.expand(query.shape[0], f.heads, query.shape[1], key.shape[1])
    for b in range(query.shape[0]):
        for h in range(f.heads):
            own = slice(h * width, (h + 1) * width)
            group = h // (f.heads // f.key_heads)
            theirs = slice(group * width, (group + 1) * width)
            for i in range(query.shape[1]):
                q = turned(query[b, i, own], i) if rotates else query[b, i, own]
                weights = []
                for j in range(key.shape[1]):
                    k = turned(key[b, j, theirs], j) if rotates else key[b, j, theirs]
                    weights.append(math.exp(float(q @ k) / math.sqrt(width) + float(bias[b, h, i, j])))
                for j, weight in enumerate(weights):
                    out[b, i, own] += weight / sum(weights) * value[b, j, theirs]
    return out @ f.output.weight.T + f.output.bias


@pytest.mark.matrix(4)
@torch.no_grad()
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("rotates", [False, True], ids=["still", "rotated"])
def test_self_attention_is_its_formula(mask: str, kv_heads: int, rotates: bool) -> None:
    f, x, (given, bias) = make(SelfAttention, kv_heads=kv_heads), states(LENGTH, 1), MASKS[mask]
    rotation = Rotary(f.head_dim, decays=False)(torch.arange(LENGTH)[None], torch.float64) if rotates else None
    query, key, value = (x @ f.query_key_value.weight.T + f.query_key_value.bias).split(f.rows, dim=-1)
    torch.testing.assert_close(f(x, given, rotation), by_loops(f, query, key, value, bias, rotates))


@torch.no_grad()
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_cross_attention_is_its_formula(kv_heads: int) -> None:
    f, x, memory = make(CrossAttention, kv_heads=kv_heads), states(LENGTH, 1), states(SOURCE, 2)
    real = torch.tensor([[True, True, True, False], [True, False, True, True]])[:, None, None]
    bias = torch.zeros(BATCH, 1, 1, SOURCE).masked_fill(~real, -math.inf)
    key, value = (memory @ f.key_value.weight.T + f.key_value.bias).split(f.rows, dim=-1)
    expected = by_loops(f, x @ f.query.weight.T + f.query.bias, key, value, bias, False)
    torch.testing.assert_close(f(x, memory, Mask(values=real)), expected)


@torch.no_grad()
@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("cuts", [(1, 1, 1, 1, 1), (3, 2)])
def test_a_cache_gives_what_whole_sequences_give(kv_heads: int, cuts: tuple[int, ...]) -> None:
    f, x, cache, past, parts = make(SelfAttention, kv_heads=kv_heads), states(LENGTH, 1), LayerCache(LENGTH), 0, []
    turn = Rotary(f.head_dim, decays=False)
    for new in x.split(cuts, dim=1):
        length = new.shape[1]
        mask = Mask(values=causal_grid(length, past + length, past, x.device))
        parts.append(f(new, mask, turn(torch.arange(past, past + length)[None], torch.float64), cache, past))
        past += length
    whole = f(x, Mask(causal=True), turn(torch.arange(LENGTH)[None], torch.float64))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)


@torch.no_grad()
def test_the_keys_of_the_source_are_computed_once() -> None:
    f, x, memory, cache = make(CrossAttention), states(LENGTH, 1), states(SOURCE, 2), LayerCache(LENGTH)
    whole = f(x, memory, Mask())
    parts = [f(x[:, :2], memory, Mask(), cache), f(x[:, 2:], None, Mask(), cache)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
