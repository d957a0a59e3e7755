"""The largest attention logit of each layer, in every form of a model, against loops in fp64 over what hooks see."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import kilolayer as kl
from kilolayer.layers import attention
from kilolayer.layers.attention import Attention, SelfAttention
from kilolayer.speed.fast import compile_layers, fast_form
from kilolayer.speed.operators import kernels
from tests.fixtures.formulas import normed
from tests.speed.plain_and_fast import SOURCE, SPARSE, TARGET, assert_equal, batch_of, build, run

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"kv_heads": 1},
    "qk_norm": {"qk_norm": True},
    "rotary": {"positions": "rotary", "qk_norm": True, "kv_heads": 1},
    "t5": {"positions": "t5"},
    "sparse": {"moe": SPARSE},
}


def measured(form: Any, batch: tuple[Tensor, ...]) -> dict[str, list[tuple[float, float]]]:
    """What one forward and backward pass writes: of self- and of cross-attention, -inf where there is none."""
    for stack in form.stacks():
        stack.largest_logits = [(torch.tensor(-math.inf), torch.tensor(-math.inf)) for _ in stack.blocks]
    run(form, batch)
    return {stack.side: [(float(own), float(cross)) for own, cross in stack.largest_logits] for stack in form.stacks()}


def projected(matrix: Any, x: Tensor) -> Tensor:
    return x @ matrix.weight.T + (0 if matrix.bias is None else matrix.bias)


def rotated(x: Tensor, position: int) -> Tensor:
    half = len(x) // 2
    angle = position * 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    left, right = x[:half], x[half:]
    return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()])


def largest_by_loops(f: Any, inputs: tuple[Any, ...], queries: Tensor, keys: Tensor, stack: Any) -> float:
    """queries, keys: ids, 0 at padding."""
    own, x = isinstance(f, SelfAttention), f.input_shift(inputs[0])
    width, dim = f.head_dim, f.heads * f.head_dim
    if own:
        packed = projected(f.query_key_value, x)
        query, key = packed[..., :dim], packed[..., dim : dim + f.key_width]
    else:
        query = projected(f.query, x)
        key = projected(f.key_value, inputs[1])[..., : f.key_width]
    query, key = (each.unflatten(-1, (-1, width)) for each in (query, key))
    query, key = normed(query, f.query_norm), normed(key, f.key_norm)
    places = (queries != 0).cumsum(1) - 1
    largest = -math.inf
    for row in range(len(queries)):
        for i in queries[row].nonzero().flatten().tolist():
            for j in keys[row].nonzero().flatten().tolist():
                if own and stack.side == "decoder" and j > i:
                    continue
                for head in range(f.heads):
                    q, k = query[row, i, head], key[row, j, head * f.key_heads // f.heads]
                    if own and stack.positions.rotary is not None:
                        q, k = rotated(q, int(places[row, i])), rotated(k, int(places[row, j]))
                    logit = float(q @ k) / math.sqrt(width)
                    if own and stack.positions.bias is not None:
                        logit += float(stack.positions.bias(places[row, i][None, None], places[row, j][None, None])[0, head])
                    largest = max(largest, logit)
    return largest


@torch.no_grad()
def expected(model: Any, batch: tuple[Tensor, ...]) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    calls: dict[Any, tuple[Any, ...]] = {}
    hooks = [
        module.register_forward_pre_hook(lambda module, inputs: calls.__setitem__(module, inputs))
        for module in model.modules()
        if isinstance(module, Attention)
    ]
    model(*batch)
    for hook in hooks:
        hook.remove()
    for stack in model.stacks():
        ids = batch[-1] if stack.side == "decoder" else batch[0]
        for block in stack.blocks:
            functions = [sublayer.f for sublayer in block.sublayers() if isinstance(sublayer.f, Attention)]
            values = [
                largest_by_loops(f, calls[f], ids, ids if isinstance(f, SelfAttention) else batch[0], stack) for f in functions
            ]
            found.setdefault(stack.side, []).append((values[0], values[1] if len(values) > 1 else -math.inf))
    return found


def assert_measured(form: Any, model: Any) -> None:
    batch = batch_of(model)
    for side, layers in expected(model, batch).items():
        for found, exact in zip(measured(form, batch)[side], layers, strict=True):
            assert found == pytest.approx(exact, rel=1e-6)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("recipe", kl.recipes.names())
def test_it_is_the_largest_of_real_positions_under_every_recipe(recipe: str) -> None:
    model = build("encoder_decoder", recipe, pad_id=0, layers=2)
    assert_measured(model, model)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("shape", ["encoder", "decoder", "encoder_decoder"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_so_it_is_in_every_kind_of_model(shape: str, options: dict[str, Any]) -> None:
    model = build(shape, pad_id=0, layers=2, **options)
    assert_measured(model, model)


@pytest.mark.matrix(3)
@pytest.mark.usefixtures("every_operator")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_fast_form_finds_the_same(options: dict[str, Any]) -> None:
    model = build("encoder_decoder", pad_id=0, layers=2, **options)
    assert_measured(fast_form(model), model)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("short", [False, True], ids=["long", "short"])
@pytest.mark.filterwarnings("default")  # the compiler warns about itself
def test_a_compiled_layer_finds_the_same_and_is_not_changed(
    short: bool, recompute: Any, request: pytest.FixtureRequest
) -> None:
    model = build("encoder_decoder", pad_id=0, layers=2)
    torch._dynamo.reset()
    form = fast_form(model, recompute)
    compile_layers(form, "aot_eager")
    if short:
        request.getfixturevalue("every_operator")
    with nullcontext() if short else kernels.assumed("cpu"):
        assert_measured(form, model)
        for stack in form.stacks():
            stack.largest_logits = None
        assert_equal(run(form), run(model))


@pytest.mark.parametrize("length", [4, 5, 11])
def test_long_sequences_are_measured_in_blocks(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MEASURED_QUERIES", 4)
    model, ids = build("decoder", pad_id=0, layers=1), torch.randint(1, 11, (3, length))
    found = measured(model, (ids,))
    assert found["decoder"][0] == pytest.approx(expected(model, (ids[:1],))["decoder"][0])


def test_it_is_taken_over_the_first_rows_that_have_enough_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MEASURED_QUERIES", 6)
    model = build("encoder_decoder", pad_id=0, layers=1)
    found = measured(model, (SOURCE, TARGET))
    one, two = (expected(model, (SOURCE[:rows], TARGET[:rows])) for rows in (1, 2))
    assert found["encoder"][0] == pytest.approx(one["encoder"][0])  # rows of 6 positions
    assert found["decoder"][0] == pytest.approx(two["decoder"][0])  # rows of 5


@torch.no_grad()
def test_the_logits_of_a_chunk_after_cached_positions_are_measured() -> None:
    torch.manual_seed(0)
    model = kl.Decoder(vocab_size=20, dim=8, heads=2, ffn_dim=12, layers=2).double().eval()
    tokens = torch.randint(1, 20, (2, 7))
    found = []
    for cuts in ([7], [3, 4]):
        model.decoder.largest_logits = [(torch.tensor(-math.inf), torch.tensor(-math.inf)) for _ in range(2)]
        cache = model.new_cache(7)
        for chunk in tokens.split(cuts, dim=1):
            model(chunk, cache=cache)
        found.append([float(own) for own, _ in model.decoder.largest_logits])
    assert found[0] == pytest.approx(found[1])
