"""Multi-head attention through SDPA: self-attention and cross-attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kilolayer.layers.cache import KeptKeys, StaticKeys
from kilolayer.layers.function import Function
from kilolayer.layers.mask import Mask
from kilolayer.layers.norm import make_norm
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.position import Rotation
from kilolayer.layers.projection import Projection
from kilolayer.layers.scale import HeadScale, make_shift
from kilolayer.operators.heads_product import can_fuse_heads_product, heads_product
from kilolayer.operators.short_attention import short_cross_attention, short_self_attention
from kilolayer.operators.step_attention import step_cross_attention, step_self_attention
from kilolayer.recipes.base import Plan, Role


class Attention(Function):
    """What both kinds share: the heads, their mixing by SDPA, and the output projection."""

    def __init__(
        self, options: LayerOptions, plan: Plan, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_dim = options.heads, options.key_heads, options.head_dim
        self.dropout = options.attention_dropout
        self.input_shift = make_shift(plan.shifts, device, dtype)
        self.head_scale = HeadScale(options.heads, device, dtype) if plan.head_scale else nn.Identity()
        self.inner_norm = make_norm(plan.inner_norm, options.dim, options, device, dtype)
        self.output = Projection(options.dim, [(Role.ATTENTION_OUTPUT, options.dim)], plan, device, dtype)

    def split_heads(self, x_BLD: Tensor) -> Tensor:
        """[batch, length, heads * head width] to [batch, heads, length, head width]."""
        return x_BLD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def project(self, x: Tensor, projection: Projection, *, straight: bool) -> Sequence[Tensor]:
        """The parts of a projection of [batch, length, dim], [batch, heads, length, head width] each.

        straight: SDPA reads them as they are, and hands their gradients back as they go into the backward of the product.
        """
        weight, bias = projection.weight, projection.bias
        if straight and self.training and bias is not None and can_fuse_heads_product(x.device, weight.dtype, self.head_dim):
            return heads_product(x.to(weight.dtype), weight, bias, projection.rows, self.head_dim)
        return [self.split_heads(part) for part in projection(x).split(projection.rows, dim=-1)]

    def attend(self, query_BHLD: Tensor, key_BHLD: Tensor, value_BHLD: Tensor, mask: Mask) -> Tensor:
        """softmax(q k^T / sqrt(head width)) v under the mask, and what `finish` does. To [batch, queries, dim]."""
        grouped = self.key_heads != self.heads
        if grouped and not _serves_groups(query_BHLD, mask):
            repeats = self.heads // self.key_heads
            key_BHLD, value_BHLD = (part.repeat_interleave(repeats, dim=1) for part in (key_BHLD, value_BHLD))
            grouped = False
        heads_BHLD = F.scaled_dot_product_attention(
            query_BHLD,
            key_BHLD,
            value_BHLD,
            attn_mask=mask.values,
            is_causal=mask.causal,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=grouped,
        )
        return self.finish(heads_BHLD)

    def finish(self, heads_BHLD: Tensor) -> Tensor:
        """LN(concat(g_h head_h)); the norm and the g_h where the plan has them. To [batch, queries, dim]."""
        return self.inner_norm(self.head_scale(heads_BHLD).transpose(1, 2).flatten(2))


def _serves_groups(query: Tensor, mask: Mask) -> bool:
    """Whether a fused kernel takes fewer key heads; on CUDA the others fall back to the whole score matrix."""
    return query.device.type == "cpu" or (mask.values is None and query.dtype in (torch.float16, torch.bfloat16))


class SelfAttention(Attention):
    """Every position looks at the positions that the mask allows. [batch, length, dim] to the same."""

    def __init__(
        self, options: LayerOptions, plan: Plan, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(options, plan, device, dtype)
        width, key_width = options.dim, self.key_heads * self.head_dim
        parts = [(Role.QUERY_KEY, width), (Role.QUERY_KEY, key_width), (Role.VALUE, key_width)]
        self.query_key_value = Projection(options.dim, parts, plan, device, dtype)

    def hidden(
        self, x: Tensor, mask: Mask, rotation: Rotation | None = None, cache: KeptKeys | None = None, past: int | Tensor = 0
    ) -> Tensor:
        x = self.input_shift(x)
        if mask.short:
            packed = self.query_key_value(x)
            return self.finish(
                self.split_heads(short_self_attention(packed, mask.keys, self.heads, self.key_heads, mask.causal))
            )
        query, key, value = self.project(x, self.query_key_value, straight=rotation is None and cache is None)
        if rotation is not None:
            query, key = rotation.rotate_query(query), rotation.rotate_key(key)
        if mask.step:
            assert isinstance(cache, StaticKeys)
            assert isinstance(past, Tensor)
            assert mask.values is not None
            mixed = step_self_attention(query, key, value, cache.keys, cache.values, mask.values, past)
            return self.finish(self.split_heads(mixed))
        if cache is not None:
            key, value = cache.append(key, value, past)
        return self.attend(query, key, value, mask)


class CrossAttention(Attention):
    """Every target position looks at the encoder's output. [batch, target, dim] and [batch, source, dim] to the first."""

    def __init__(
        self, options: LayerOptions, plan: Plan, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(options, plan, device, dtype)
        key_width = self.key_heads * self.head_dim
        self.query = Projection(options.dim, [(Role.QUERY_KEY, options.dim)], plan, device, dtype)
        self.key_value = Projection(options.dim, [(Role.QUERY_KEY, key_width), (Role.VALUE, key_width)], plan, device, dtype)

    def hidden(self, x: Tensor, memory: Tensor, mask: Mask, cache: KeptKeys | None = None) -> Tensor:
        query = self.query(self.input_shift(x))
        if mask.short:
            packed = self.key_value(memory)
            return self.finish(self.split_heads(short_cross_attention(query, packed, mask.keys, self.heads, self.key_heads)))
        key, value = self.read(memory, cache)
        if mask.step:
            assert mask.values is not None
            return self.finish(self.split_heads(step_cross_attention(self.split_heads(query), key, value, mask.values)))
        return self.attend(self.split_heads(query), key, value, mask)

    def read(self, memory: Tensor, cache: KeptKeys | None) -> tuple[Tensor, Tensor]:
        """Keys and values of the source, from the cache after the first step."""
        if cache is not None and cache.memory is not None:
            return cache.memory
        key, value = self.project(memory, self.key_value, straight=cache is None)
        if cache is not None:
            cache.memory = (key, value)
        return key, value
