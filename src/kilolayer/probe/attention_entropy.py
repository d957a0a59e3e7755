"""The entropy of each layer's attention, relative to uniform attention: 1 is uniform, 0 attends to a single position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kilolayer.layers.attention import Attention, CrossAttention, SelfAttention, attention_weights
from kilolayer.layers.mask import Mask, causal_grid
from kilolayer.models.model import Model
from kilolayer.probe.hooks import ByKind, compute, forward_hooks, layer_and_module, table_by_module
from kilolayer.probe.propagation import Loss


def attention_entropy(model: Model, loss: Loss) -> ByKind:
    """-sum p log p / log(visible positions), by stack and layer: the mean over heads and over queries that see two or more."""
    found: dict[str, dict[tuple[int | None, str], float]] = {stack.side: {} for stack in model.stacks()}
    with forward_hooks(model) as hooks:
        for stack in hooks.stacks:
            for name, module in stack.named_modules():
                if isinstance(module, Attention):
                    key = layer_and_module(name)

                    def record(
                        attention: Attention,
                        inputs: tuple[Any, ...],
                        key: tuple[int | None, str] = key,
                        side: str = stack.side,
                    ) -> None:
                        found[side][key] = _relative_entropy(*_weights(attention, inputs), hooks.real[side])

                    hooks.before(module, record)
        compute(model, loss)
    return {stack.side: table_by_module(found[stack.side], len(stack.blocks)) for stack in model.stacks()}


def _weights(attention: Attention, inputs: tuple[Any, ...]) -> tuple[Tensor, Mask]:
    """The weights [batch, heads, queries, keys] and the mask of an attention, from the arguments of its forward."""
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
    return attention_weights(query, key, mask), mask


def _relative_entropy(weights_BHQK: Tensor, mask: Mask, real: Tensor | None) -> float:
    visible = torch.ones_like(weights_BHQK[:, :1], dtype=torch.bool)
    if mask.causal:
        queries, keys = weights_BHQK.shape[-2:]
        visible = visible & causal_grid(queries, keys, 0, weights_BHQK.device)
    if mask.values is not None:
        visible = visible & (mask.values if mask.values.dtype == torch.bool else mask.values > float("-inf"))
    entropy = torch.special.entr(weights_BHQK).sum(dim=-1)
    count = visible.sum(dim=-1).expand_as(entropy)
    counted = count > 1
    if real is not None:
        counted = counted & real[:, None]
    return float((entropy[counted] / count[counted].log()).double().mean())
