"""`model.qk_norm`: normalized queries and keys, in every form of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kilolayer as kl
from kilolayer.huggingface.foreign_class import shared_misfits
from kilolayer.layers.attention import CrossAttention, SelfAttention
from kilolayer.layers.mask import Mask
from kilolayer.layers.position import Positions
from kilolayer.models.fold import fold
from kilolayer.probe.attention_entropy import attention_entropy
from kilolayer.probe.norm_inputs import norm_inputs
from kilolayer.speed.fast import fast_form
from kilolayer.speed.written import WrittenStack, unroll_for_cpu

SIZES: dict[str, Any] = {"dim": 16, "heads": 4, "ffn_dim": 12, "layers": 2, "vocab_size": 11, "qk_norm": True}
SOURCE = torch.tensor([[3, 5, 2, 9, 4, 0], [8, 1, 7, 1, 8, 6]])
TARGET = torch.tensor([[3, 5, 2, 9], [4, 1, 7, 2]])
NORMS = pytest.mark.parametrize("norm", ["layer", "rms"])
SHAPES = pytest.mark.parametrize("shape", ["encoder", "decoder", "encoder_decoder"])


def build(shape: str, **options: Any) -> Any:
    model = kl.build_model({"shape": shape, **SIZES, **options}, dtype=torch.float64, seed=0)
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            weight += 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number), dtype=weight.dtype)
    return model


def inputs_of(model: Any) -> tuple[Tensor, ...]:
    return (SOURCE, TARGET) if isinstance(model, kl.EncoderDecoder) else (SOURCE,)


def normed(x: Tensor, norm: Any) -> Tensor:
    centred = x if norm.bias is None else x - x.mean()
    y = centred / (centred.square().mean() + 1e-5).sqrt() * norm.weight
    return y if norm.bias is None else y + norm.bias


def rotated(x: Tensor, position: int) -> Tensor:
    """RoPE on pairs (i, i + half), written out."""
    half = len(x) // 2
    angle = position * 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    first, second = x[:half], x[half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()])


def by_loops(f: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, rotates: bool) -> Tensor:
    """Attention head by head and query by query. query: [length, heads * width]; key and value: [length, key heads * width]."""
    width, rows = f.head_dim, []
    for index, q in enumerate(query):
        heads = []
        for head in range(f.heads):
            shared = head * f.key_heads // f.heads
            own, theirs = slice(head * width, (head + 1) * width), slice(shared * width, (shared + 1) * width)
            last = index + 1 if causal else len(key)
            turn = rotated if rotates else lambda x, _: x
            one = turn(normed(q[own], f.query_norm), index)
            scores = torch.stack([one @ turn(normed(key[j, theirs], f.key_norm), j) for j in range(last)]) / width**0.5
            heads.append(scores.softmax(0) @ value[:last, theirs])
        rows.append(f.output.weight @ torch.cat(heads) + f.output.bias)
    return torch.stack(rows)


@pytest.mark.matrix(3)
@NORMS
@pytest.mark.parametrize("positions", ["sinusoidal", "rotary"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_self_attention_is_its_formula(norm: str, positions: str, kv_heads: int) -> None:
    model = build("decoder", norm=norm, positions=positions, kv_heads=kv_heads)
    f, x = model.decoder.blocks[0].self_attention.f, torch.randn(1, 5, 16, dtype=torch.float64)
    assert isinstance(f, SelfAttention)
    table = Positions(model.config, "decoder").rotary
    rotation = None if table is None else table(torch.arange(5)[None], torch.float64)
    query, key, value = (x[0] @ f.query_key_value.weight.T + f.query_key_value.bias).split(f.rows, dim=-1)
    expected = by_loops(f, query, key, value, causal=True, rotates=positions == "rotary")
    torch.testing.assert_close(f(x, Mask(causal=True), rotation)[0], expected)


@NORMS
def test_cross_attention_is_its_formula(norm: str) -> None:
    f = build("encoder_decoder", norm=norm).decoder.blocks[0].cross_attention.f
    x, memory = torch.randn(1, 3, 16, dtype=torch.float64), torch.randn(1, 5, 16, dtype=torch.float64)
    assert isinstance(f, CrossAttention)
    key, value = (memory[0] @ f.key_value.weight.T + f.key_value.bias).split(f.rows, dim=-1)
    expected = by_loops(f, x[0] @ f.query.weight.T + f.query.bias, key, value, causal=False, rotates=False)
    torch.testing.assert_close(f(x, memory, Mask())[0], expected)


@SHAPES
def test_it_adds_two_norms_to_each_attention_and_changes_no_other_name(shape: str) -> None:
    plain, own = build(shape, qk_norm=False).state_dict().keys(), build(shape).state_dict().keys()
    norms = {f"{part}_norm.{what}" for part in ("query", "key") for what in ("weight", "bias")}
    assert plain < own
    assert {name.split(".f.")[1] for name in own - plain} == norms


def test_logits_are_bounded_however_large_the_weights_are() -> None:
    model = kl.build_model({"shape": "encoder", **SIZES}, dtype=torch.float64, seed=0)
    f: Any = model.encoder.blocks[0].self_attention.f
    with torch.no_grad():
        f.query_key_value.weight.mul_(1e6)
    query, key, _ = f.project(torch.randn(2, 5, 16, dtype=torch.float64))
    assert (query @ key.mT / f.head_dim**0.5).abs().max() <= f.head_dim**0.5 + 1e-9


def results(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    logits = model(*inputs_of(model)).logits
    logits.square().sum().backward()
    return {"logits": logits.detach(), **{name: weight.grad for name, weight in model.named_parameters()}}


@pytest.mark.matrix(4)
@pytest.mark.usefixtures("every_operator")
@NORMS
@SHAPES
@pytest.mark.parametrize("options", [{}, {"positions": "rotary", "kv_heads": 2}], ids=["short", "rotary"])
def test_the_fast_form_computes_the_same(norm: str, shape: str, options: dict[str, Any]) -> None:
    model = build(shape, norm=norm, recipe="sub_ln", pad_id=0, **options).train()
    expected, found = results(model), results(fast_form(model))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=name)


@pytest.mark.matrix(4)
@NORMS
@pytest.mark.parametrize("positions", ["sinusoidal", "rotary"])
@pytest.mark.parametrize("shape", ["decoder", "encoder_decoder"])
@pytest.mark.parametrize("written", [False, True], ids=["plain", "written"])
@torch.no_grad()
def test_cached_decoding_gives_the_logits_of_the_whole(norm: str, positions: str, shape: str, written: bool) -> None:
    model = build(shape, norm=norm, positions=positions).eval()
    pair = isinstance(model, kl.EncoderDecoder)
    whole = model(SOURCE, TARGET).logits if pair else model(TARGET).logits
    form = unroll_for_cpu(model) if written else model
    assert isinstance(form.decoder, WrittenStack) is written
    cache, source = form.new_cache(TARGET.shape[1]), form.encode(SOURCE) if pair else None
    steps = [form.decode(token, source, cache=cache) if pair else form(token, cache=cache) for token in TARGET.split(1, dim=1)]
    torch.testing.assert_close(torch.cat([step.logits for step in steps], dim=1), whole)


@torch.no_grad()
def test_folding_is_exact() -> None:
    model = build("encoder_decoder", recipe="deepnorm").eval()
    folded = fold(model)
    assert folded.config.qk_norm
    torch.testing.assert_close(folded(SOURCE, TARGET).logits, model(SOURCE, TARGET).logits)


@SHAPES
def test_it_is_measured(shape: str) -> None:
    model = build(shape, pad_id=0)
    loss = lambda each: each(*inputs_of(each)).logits.sum()  # noqa: E731
    found = norm_inputs(model, loss)
    for stack in model.stacks():
        assert {"self_attention.query_norm", "self_attention.key_norm"} <= found[stack.side].keys()
    if shape == "encoder_decoder":
        source = model.encode(SOURCE).states.detach()
        f = model.decoder.blocks[0].cross_attention.f
        keys = (source @ f.key_value.weight.T + f.key_value.bias)[..., :16][SOURCE != 0]
        assert found["decoder"]["cross_attention.key_norm"][0] == pytest.approx(float(keys.detach().square().mean().sqrt()))
    assert all(value == value for value in attention_entropy(model, loss)[model.stacks()[0].side]["self_attention"])


def test_classes_of_others_say_why_not() -> None:
    config = kl.ModelConfig(layers=1, dim=16, heads=2, ffn_dim=8, vocab_size=11, qk_norm=True)
    assert "its queries and keys are normalized (qk_norm)" in list(shared_misfits(config))


def test_the_modelling_file_of_an_exported_folder_computes_it(tmp_path: Path) -> None:
    auto_classes = pytest.importorskip("kilolayer.huggingface.auto_classes")
    transformers = pytest.importorskip("transformers")
    model = build("decoder", positions="rotary").float().eval()
    auto_classes.KilolayerForCausalLM.from_kilolayer(model).save_pretrained(tmp_path)
    assert "self.query_norm" in (tmp_path / "modeling_kilolayer.py").read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(TARGET).logits, model(TARGET).logits)
