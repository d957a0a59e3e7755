"""How widely each layer's attention looks: 1 where it spreads over all that it may see, 0 where it looks at one place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kilolayer.layers.attention import Attention, CrossAttention, SelfAttention
from kilolayer.layers.mask import Mask, causal_grid
from kilolayer.models.model import Model
from kilolayer.probe.places import ByKind, compute, layer_and_place, looking, table_by_place
from kilolayer.probe.propagation import Loss


def attention_entropy(model: Model, loss: Loss) -> ByKind:
    """-sum p log p over the logarithm of the visible places, the mean over heads and over places that see two or more."""
    found: dict[str, dict[tuple[int | None, str], float]] = {stack.side: {} for stack in model.stacks()}
    with looking(model) as look:
        for stack in look.stacks:
            for name, module in stack.named_modules():
                if isinstance(module, Attention):
                    key = layer_and_place(name)

                    def note(
                        attention: Attention,
                        inputs: tuple[Any, ...],
                        key: tuple[int | None, str] = key,
                        side: str = stack.side,
                    ) -> None:
                        found[side][key] = _relative_entropy(*_scores(attention, inputs), look.real[side])

                    look.before(module, note)
        compute(model, loss)
    return {stack.side: table_by_place(found[stack.side], len(stack.blocks)) for stack in model.stacks()}


def _scores(attention: Attention, inputs: tuple[Any, ...]) -> tuple[Tensor, Mask]:
    """q k^T / sqrt(head width), [batch, heads, queries, keys], and the mask on it, from what the attention is called with."""
    if isinstance(attention, SelfAttention):
        x, mask, rotation, *_ = inputs
        query, key, _ = attention.project(x)
        if rotation is not None:
            query, key = rotation.rotate_query(query), rotation.rotate_key(key)
    else:
        assert isinstance(attention, CrossAttention)
        x, memory, mask, *_ = inputs
        query = attention.project(x)
        key, _ = attention.project_memory(memory)
    key = key.repeat_interleave(attention.heads // attention.key_heads, dim=1)
    return query.float() @ key.float().mT / attention.head_dim**0.5, mask


def _relative_entropy(scores_BHQK: Tensor, mask: Mask, real: Tensor | None) -> float:
    visible = torch.ones_like(scores_BHQK[:, :1], dtype=torch.bool)
    if mask.causal:
        queries, keys = scores_BHQK.shape[-2:]
        visible = visible & causal_grid(queries, keys, 0, scores_BHQK.device)
    if mask.values is not None:
        bias = mask.values
        visible = visible & (bias if bias.dtype == torch.bool else bias > float("-inf"))
        scores_BHQK = scores_BHQK if bias.dtype == torch.bool else scores_BHQK + bias
    shares = scores_BHQK.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    entropy = torch.special.entr(shares).sum(dim=-1)
    count = visible.sum(dim=-1).expand_as(entropy)
    counted = count > 1
    if real is not None:
        counted = counted & real[:, None]
    return float((entropy[counted] / count[counted].log()).double().mean())
