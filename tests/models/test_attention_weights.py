"""Attention weights on request, beside loops over batch, heads and positions in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kilolayer as kl
from kilolayer.layers.attention import Attention, SelfAttention

SOURCE = torch.tensor([[3, 5, 2, 9, 4], [7, 1, 8, 0, 0]])
TARGET = torch.tensor([[1, 6, 2, 0], [4, 2, 7, 3]])
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "encoder": ("encoder", {"recipe": "deepnorm"}),
    "decoder, rotary, fewer key heads": ("decoder", {"recipe": "sub_ln", "positions": "rotary", "kv_heads": 2}),
    "decoder without padding": ("decoder", {"recipe": "pre_ln", "pad_id": None}),
    "translation, relative positions": ("encoder_decoder", {"recipe": "normformer", "positions": "t5"}),
    "translation with a second state": ("encoder_decoder", {"recipe": "resi_dual"}),
}


def make(shape: str, **options: Any) -> Any:
    sizes = {"vocab_size": 11, "dim": 16, "heads": 4, "ffn_dim": 24, "layers": 2}
    return kl.build_model(kl.ModelConfig(shape=shape, **{**sizes, **options}), dtype=torch.float64, seed=2)  # pyright: ignore


@torch.no_grad()
def attention_by_loop(attention: Attention, inputs: tuple[Any, ...], visible: Tensor) -> Tensor:
    """softmax(q k / sqrt(width) + bias) over what is visible, bool [batch, queries, keys], number by number."""
    x = inputs[0]
    if isinstance(attention, SelfAttention):
        mask, rotation = inputs[1], inputs[2]
        parts = attention.query_key_value(x).split(attention.rows, dim=-1)
        query, key = parts[0], parts[1]
    else:
        memory, mask, rotation = inputs[1], inputs[2], None
        query, key = attention.query(x), attention.key_value(memory)[..., : attention.key_width]  # pyright: ignore
    width = attention.head_dim
    query = query.unflatten(-1, (-1, width)).transpose(1, 2)
    key = key.unflatten(-1, (-1, width)).transpose(1, 2)
    if rotation is not None:
        query, key = rotation.rotate_query(query), rotation.rotate_key(key)
    shared = attention.heads // attention.key_heads
    weights = torch.zeros(*query.shape[:3], key.shape[2], dtype=torch.float64)
    for row in range(query.shape[0]):
        for head in range(attention.heads):
            for index in range(query.shape[2]):
                seen = visible[row, index].nonzero().flatten().tolist()
                scores = []
                for other in seen:
                    score = float(query[row, head, index] @ key[row, head // shared, other]) / math.sqrt(width)
                    if mask.values is not None:
                        score += float(mask.values.expand(weights.shape)[row, head, index, other])
                    scores.append(score)
                total = sum(math.exp(score) for score in scores)
                for other, score in zip(seen, scores, strict=True):
                    weights[row, head, index, other] = math.exp(score) / total
    return weights


@pytest.mark.matrix(2)
@pytest.mark.parametrize(("shape", "options"), CASES.values(), ids=CASES)
def test_they_are_those_of_a_loop(shape: str, options: dict[str, Any]) -> None:
    model = make(shape, **options).eval()
    called: dict[nn.Module, tuple[Any, ...]] = {}
    for module in model.modules():
        if isinstance(module, Attention):
            module.register_forward_pre_hook(lambda module, inputs: called.setdefault(module, inputs) and None)
    batch = (SOURCE, TARGET) if shape == "encoder_decoder" else (SOURCE,)
    out = model(*batch, attention_weights=True)
    padded = model.config.pad_id is not None
    for stack in model.stacks():
        own = TARGET if shape == "encoder_decoder" and stack.side == "decoder" else SOURCE
        real = own.ne(0) if padded else torch.ones_like(own, dtype=torch.bool)
        visible = real[:, None, :].expand(-1, own.shape[1], -1)
        if stack.side == "decoder":
            visible = visible & torch.ones(own.shape[1], own.shape[1], dtype=torch.bool).tril()
        found = out.encoder_attention if shape == "encoder_decoder" and stack.side == "encoder" else out.attention
        assert len(found) == len(stack.blocks)
        for block, weights in zip(stack.blocks, found, strict=True):
            expected = attention_by_loop(block.self_attention.f, called[block.self_attention.f], visible)
            torch.testing.assert_close(weights.detach(), expected, rtol=1e-10, atol=1e-12)
            assert not weights.masked_select(~visible[:, None]).any()
            torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        if hasattr(stack.blocks[0], "cross_attention"):
            visible = SOURCE.ne(0)[:, None, :].expand(-1, own.shape[1], -1)
            for block, weights in zip(stack.blocks, out.cross_attention, strict=True):
                expected = attention_by_loop(block.cross_attention.f, called[block.cross_attention.f], visible)
                torch.testing.assert_close(weights.detach(), expected, rtol=1e-10, atol=1e-12)


def test_the_rest_of_the_output_is_as_without_them() -> None:
    model = make("encoder_decoder", recipe="deepnorm", dropout=0.1, attention_dropout=0.2).train()
    torch.manual_seed(1)
    plain = model(SOURCE, TARGET)
    torch.manual_seed(1)
    asked = model(SOURCE, TARGET, attention_weights=True)
    assert torch.equal(plain.logits, asked.logits)
    assert plain.attention is plain.cross_attention is plain.encoder_attention is None
    torch.testing.assert_close(asked.attention[0].sum(-1), torch.ones(2, 4, 4, dtype=torch.float64))
    asked.cross_attention[-1].square().sum().backward()
    assert model.decoder.blocks[-1].cross_attention.f.query.weight.grad.any()


def test_a_fast_form_and_a_step_of_decoding_give_the_same() -> None:
    model = make("encoder_decoder", recipe="sub_ln").eval()
    whole = model(SOURCE, TARGET, attention_weights=True)
    fast = kl.fast(model)(SOURCE, TARGET, attention_weights=True)
    memory, cache = model.encode(SOURCE), model.new_cache(4)
    steps = [model.decode(TARGET[:, i : i + 1], memory, cache=cache, attention_weights=True) for i in range(4)]
    for layer in range(2):
        torch.testing.assert_close(fast.attention[layer], whole.attention[layer])
        last = steps[-1].attention[layer]
        torch.testing.assert_close(last, whole.attention[layer][:, :, 3:])
        torch.testing.assert_close(steps[1].cross_attention[layer], whole.cross_attention[layer][:, :, 1:2])
