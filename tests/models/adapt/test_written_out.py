"""T5 and Llama under a recipe, beside the equation written out: our own models have no such layers."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kilolayer as kl
from tests.models.adapt.adaptable_models import SOURCE, SOURCE_REAL, TARGET, TARGET_REAL, llama, run, t5

STEPS = 50


def heads(x: Tensor, weight: Tensor, width: int) -> Tensor:
    """[batch, length, dim] to [batch, heads, length, width]."""
    return F.linear(x, weight).unflatten(-1, (-1, width)).transpose(1, 2)


def mixed(query: Tensor, key: Tensor, value: Tensor, scores_bias: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T + bias) v, the heads side by side."""
    weights = (scale * query @ key.transpose(-1, -2) + scores_bias).softmax(-1)
    return (weights @ value).transpose(1, 2).flatten(2)


def branch(added: Any, inside: Tensor, weight: Tensor) -> Tensor:
    """N_post(W N_inner(g_h head_h)): what NormFormer and Sub-LN write beside the class's own f."""
    if added.heads and hasattr(added.head_scale, "weight"):
        inside = inside * added.head_scale.weight.flatten().repeat_interleave(inside.shape[-1] // added.heads)
    return added.post_norm(F.linear(added.inner_norm(inside), weight))


def written_t5(model: Any) -> Tensor:
    """The decoder's states. T5's scores have a bias by distance and no 1 / sqrt(width)."""
    hidden = torch.zeros(2, 1, 1, 5, dtype=torch.float64).masked_fill(~SOURCE_REAL[:, None, None], -torch.inf)
    future = torch.zeros(4, 4, dtype=torch.float64).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
    memory = written_t5_stack(model.encoder, model.shared(SOURCE), hidden, None, hidden)
    return written_t5_stack(model.decoder, model.shared(TARGET), future, memory, hidden)


def written_t5_stack(stack: Any, x: Tensor, mask: Tensor, memory: Tensor | None, memory_mask: Tensor) -> Tensor:
    distance = stack.block[0].layer[0].SelfAttention.compute_bias(x.shape[1], x.shape[1])
    for block in stack.block:
        first, *cross, last = block.layer
        for layer, name in ((first, "SelfAttention"), *((each, "EncDecAttention") for each in cross)):
            own = name == "SelfAttention"
            attention, read = getattr(layer, name), layer.layer_norm(x)
            other = read if own or memory is None else memory
            query, key, value = (
                heads(read, attention.q.weight, 8),
                heads(other, attention.k.weight, 8),
                heads(other, attention.v.weight, 8),
            )
            inside = mixed(query, key, value, mask + distance if own else memory_mask, 1.0)
            added = block.recipe_self_attention if own else block.recipe_cross_attention
            x = x + branch(added, inside, attention.o.weight)
        network = last.DenseReluDense
        inside = F.relu(F.linear(last.layer_norm(x), network.wi.weight))
        x = x + branch(block.recipe_feedforward, inside, network.wo.weight)
    return stack.final_layer_norm(x)


def written_llama(model: Any, in_scale: bool = False) -> Tensor:
    x = model.embed_tokens(TARGET)
    cos, sin = (each[:, None] for each in model.rotary_emb(x, torch.arange(4)[None]))
    future = torch.zeros(4, 4, dtype=torch.float64).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)

    def turned(part: Tensor) -> Tensor:
        left, right = part.chunk(2, -1)
        return part * cos + torch.cat([-right, left], -1) * sin

    for number, layer in enumerate(model.layers, 1):
        factor = 1 / math.sqrt(number) if in_scale else 1.0
        attention, read = layer.self_attn, factor * layer.input_layernorm(x)
        query, key, value = (heads(read, getattr(attention, f"{name}_proj").weight, 8) for name in "qkv")
        inside = mixed(turned(query), turned(key).expand_as(query), value.expand_as(query), future, 8**-0.5)
        x = x + branch(layer.recipe_self_attention, inside, attention.o_proj.weight)
        mlp, read = layer.mlp, factor * layer.post_attention_layernorm(x)
        inside = F.silu(F.linear(read, mlp.gate_proj.weight)) * F.linear(read, mlp.up_proj.weight)
        x = x + branch(layer.recipe_feedforward, inside, mlp.down_proj.weight)
    return model.norm(x)


CASES = [(name, recipe) for name in ("t5", "llama") for recipe in ("sub_ln", "normformer")] + [("llama", "lns")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_the_written_equation_trains_alike(name: str, recipe: str) -> None:
    model = t5() if name == "t5" else llama()
    kl.adapt(model, recipe, seed=4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    other = copy.deepcopy(model)
    goal = torch.randn(2, 4, 16, dtype=torch.float64)
    optimizers = [torch.optim.Adam(each.parameters(), lr=3e-3) for each in (model, other)]
    losses: list[float] = []
    for step in range(STEPS):
        states, real = run(model)[0], TARGET_REAL
        written = written_t5(other) if name == "t5" else written_llama(other, in_scale=recipe == "lns")
        assert (states - written)[real].abs().max() < (1e-12 if step == 0 else 1e-9)
        for output, optimizer in zip((states, written), optimizers, strict=True):
            optimizer.zero_grad()
            (output - goal)[real].square().mean().backward()
        losses.append((states - goal)[real].square().mean().item())
        for (label, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
            if step == 0 and one.grad is not None:
                torch.testing.assert_close(one.grad, two.grad, rtol=0, atol=1e-12, msg=label)
        for optimizer in optimizers:
            optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
