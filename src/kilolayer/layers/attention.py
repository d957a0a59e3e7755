"""Multi-head self-attention and cross-attention, with grouped key and value heads.

    Attention(x) = W_o LN(concat_h(g_h head_h)),    head_h = softmax(N(q_h) N(k_h)^T / sqrt(head_dim)) v_h

LN and the learned head scales g_h are present only if the recipe's plan has them, and the norms N only with `qk_norm`.
Suffixes of names give shapes: B batch, H heads, L length, D the last dimension (dim, or head_dim after H).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kilolayer.layers.cache import KeyCache
from kilolayer.layers.mask import Mask, causal_grid
from kilolayer.layers.norms.base import make_norm
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.position import Rotation
from kilolayer.layers.projection import Projection
from kilolayer.layers.scale import HeadScale, make_shift
from kilolayer.recipes.base import NORM, Plan
from kilolayer.recipes.role import Role

MEASURED_QUERIES = 512
"""How many positions of a batch the largest logit is taken over, at least: the first rows that have them."""


class Attention(nn.Module):
    """The part common to self- and cross-attention: splitting into heads, the weighted sum, and the output projection."""

    def __init__(self, options: LayerOptions, plan: Plan) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_dim = options.heads, options.key_heads, options.head_dim
        self.dropout = options.attention_dropout
        self.input_shift = make_shift(plan.shifts)
        normed = NORM if options.qk_norm else None
        self.query_norm = make_norm(normed, options.head_dim, options)
        self.key_norm = make_norm(normed, options.head_dim, options)
        self.head_scale = HeadScale(options.heads) if plan.head_scale else nn.Identity()
        self.inner_norm = make_norm(plan.inner_norm, options.dim, options)
        self.output = Projection(options.dim, [(Role.ATTENTION_OUTPUT, options.dim)], plan)
        self.key_width = self.key_heads * self.head_dim
        self.joint_rows = options.dim + 2 * self.key_width if plan.init.draw(Role.VALUE).joint else None

    def split(self, projected_BLD: Tensor, rows: Sequence[int]) -> list[Tensor]:
        """Split [batch, length, sum of rows] into parts of `rows` columns, each as [batch, heads, length, head_dim]."""
        return [part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in projected_BLD.split(rows, dim=-1)]

    def mix(self, query_BHLD: Tensor, key_BHLD: Tensor, value_BHLD: Tensor, mask: Mask) -> Tensor:
        """softmax(q k^T / sqrt(head_dim)) v under the mask: [batch, heads, queries, head_dim].

        If `mask.weights` is a list, the attention weights are computed separately and appended to it.
        """
        if mask.largest_logit is not None:
            record_largest_logit(query_BHLD, key_BHLD, mask)
        if mask.weights is not None:
            mask.weights.append(attention_weights(query_BHLD, key_BHLD, mask))
        return F.scaled_dot_product_attention(
            query_BHLD,
            key_BHLD,
            value_BHLD,
            attn_mask=mask.values,
            is_causal=mask.causal,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.key_heads != self.heads,
        )

    def finish(self, heads_BHLD: Tensor) -> Tensor:
        """W_o LN(concat(g_h head_h)): [batch, heads, queries, head_dim] to [batch, queries, dim]."""
        return self.output(self.inner_norm(self.head_scale(heads_BHLD).transpose(1, 2).flatten(2)))


def attention_logits(query_BHLD: Tensor, key_BHLD: Tensor, mask: Mask) -> Tensor:
    """q k^T / sqrt(head_dim) under the mask, in fp32 or higher precision: [batch, heads, queries, keys]; -inf where masked."""
    precise = torch.promote_types(query_BHLD.dtype, torch.float32)
    key_BHLD = key_BHLD.repeat_interleave(query_BHLD.shape[1] // key_BHLD.shape[1], dim=1)
    logits = query_BHLD.to(precise) @ key_BHLD.to(precise).mT * query_BHLD.shape[-1] ** -0.5
    if mask.causal:
        logits = logits.masked_fill(~causal_grid(logits.shape[-2], logits.shape[-1], 0, logits.device), float("-inf"))
    if mask.values is not None and mask.values.dtype == torch.bool:
        logits = logits.masked_fill(~mask.values, float("-inf"))
    elif mask.values is not None:
        logits = logits + mask.values.to(precise)
    return logits


def attention_weights(query_BHLD: Tensor, key_BHLD: Tensor, mask: Mask) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) under the mask, in fp32 or higher precision: [batch, heads, queries, keys]."""
    return attention_logits(query_BHLD, key_BHLD, mask).softmax(dim=-1)


@torch.no_grad()
def record_largest_logit(query_BHLD: Tensor, key_BHLD: Tensor, mask: Mask) -> None:
    """Raise `mask.largest_logit` to the largest logit of real queries, in the first rows with MEASURED_QUERIES positions.

    They are computed in blocks of MEASURED_QUERIES queries, so that the memory does not grow with the square of the length.
    """
    assert mask.largest_logit is not None
    batch, _, length, _ = query_BHLD.shape
    rows, keys = min(batch, -(-MEASURED_QUERIES // length)), key_BHLD.shape[-2]
    for start in range(0, length, MEASURED_QUERIES):
        queries = slice(start, min(start + MEASURED_QUERIES, length))
        part = mask.part(rows, queries, keys, query_BHLD.device)
        logits = attention_logits(query_BHLD[:rows, :, queries], key_BHLD[:rows], part)
        if mask.real is not None:
            logits = logits.masked_fill(~mask.real[:rows, None, queries, None], float("-inf"))
        mask.largest_logit.copy_(torch.maximum(mask.largest_logit, logits.amax()))


class SelfAttention(Attention):
    """Each position attends to the positions that the mask allows: [batch, length, dim] to [batch, length, dim]."""

    def __init__(self, options: LayerOptions, plan: Plan) -> None:
        super().__init__(options, plan)
        self.rows = (options.dim, self.key_width, self.key_width)
        parts = list(zip((Role.QUERY_KEY, Role.QUERY_KEY, Role.VALUE), self.rows, strict=True))
        self.query_key_value = Projection(options.dim, parts, plan, self.joint_rows)

    def forward(
        self, x: Tensor, mask: Mask, rotation: Rotation | None = None, cache: KeyCache | None = None, past: int | Tensor = 0
    ) -> Tensor:
        query, key, value = self.project(x)
        if rotation is not None:
            query, key = rotation.rotate_query(query), rotation.rotate_key(key)
        if cache is not None:
            key, value = cache.append(key, value, past)
        return self.finish(self.mix(query, key, value, mask))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [batch, heads, length, head_dim]; keys and values [batch, key_heads, length, head_dim] each."""
        query, key, value = self.split(self.query_key_value(self.input_shift(x)), self.rows)
        return self.query_norm(query), self.key_norm(key), value


class CrossAttention(Attention):
    """Each target position attends to the encoder's output.

    x [batch, target, dim] and memory [batch, source, dim] to [batch, target, dim].
    """

    def __init__(self, options: LayerOptions, plan: Plan) -> None:
        super().__init__(options, plan)
        self.query_rows, self.rows = (options.dim,), (self.key_width, self.key_width)
        parts = list(zip((Role.QUERY_KEY, Role.VALUE), self.rows, strict=True))
        self.query = Projection(options.dim, [(Role.QUERY_KEY, options.dim)], plan, self.joint_rows)
        self.key_value = Projection(options.dim, parts, plan, self.joint_rows)

    def forward(self, x: Tensor, memory: Tensor | None, mask: Mask, cache: KeyCache | None = None) -> Tensor:
        """memory: the encoder's output; may be None if the cache already holds the keys and values of the source."""
        query = self.project(x)
        key, value = self.project_memory(memory, cache)
        return self.finish(self.mix(query, key, value, mask))

    def project(self, x: Tensor) -> Tensor:
        """Queries: [batch, heads, target, head_dim]."""
        return self.query_norm(self.split(self.query(self.input_shift(x)), self.query_rows)[0])

    def project_memory(self, memory: Tensor | None, cache: KeyCache | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of the source, [batch, key_heads, source, head_dim] each; cached at the first step."""
        if cache is not None and cache.memory is not None:
            return cache.memory
        assert memory is not None
        key, value = self.split(self.key_value(memory), self.rows)
        key = self.key_norm(key)
        if cache is not None:
            cache.memory = (key, value)
        return key, value
