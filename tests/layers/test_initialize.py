"""Weights depend on the seed and on their own name, and on nothing else."""

from __future__ import annotations

import pytest
import torch

import kilolayer as kl


def build(recipe: str, **options: object) -> kl.EncoderDecoder:
    torch.manual_seed(7)
    return kl.EncoderDecoder(50, 32, 4, 64, 3, 2, recipe, tie_embeddings=False, **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.matrix(4)
@pytest.mark.parametrize("recipe", kl.recipes.names())
def test_meta_then_materialized_equals_direct(recipe: str) -> None:
    direct = build(recipe).state_dict()
    meta = build(recipe, device="meta")
    assert all(parameter.is_meta for parameter in meta.parameters())
    torch.manual_seed(99)  # what happens in between does not matter
    materialized = meta.materialize("cpu").state_dict()
    assert list(direct) == list(materialized)
    assert all(torch.equal(direct[name], materialized[name]) for name in direct)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "xpos", "t5", "none"])
def test_materialized_models_compute_the_same(positions: str) -> None:
    options = {"positions": positions, "max_length": 8 if positions == "learned" else None}
    direct, materialized = build("admin", **options), build("admin", device="meta", **options).materialize("cpu")
    source, target = torch.randint(1, 50, (2, 2, 6))
    assert torch.equal(direct(source, target).logits, materialized(source, target).logits)


def test_the_meta_context_manager_serves_too() -> None:
    torch.manual_seed(7)
    with torch.device("meta"):
        model = kl.Encoder(50, 32, 4, 64, 3)
    torch.manual_seed(7)
    direct = kl.Encoder(50, 32, 4, 64, 3)
    model.materialize("cpu")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), direct.parameters(), strict=True))


def test_a_layers_weights_do_not_depend_on_the_depth_above_it() -> None:
    torch.manual_seed(7)
    shallow = kl.Encoder(50, 32, 4, 64, 2, "post_ln").state_dict()
    torch.manual_seed(7)
    deep = kl.Encoder(50, 32, 4, 64, 9, "post_ln").state_dict()
    assert all(torch.equal(weight, deep[name]) for name, weight in shallow.items())


def test_building_takes_one_number_from_torch() -> None:
    torch.manual_seed(3)
    torch.randint(2**62, ())
    expected = torch.rand(1)
    torch.manual_seed(3)
    kl.Encoder(50, 32, 4, 64, 2)
    assert torch.equal(torch.rand(1), expected)


def test_two_models_differ_and_one_seed_repeats() -> None:
    first, second = kl.Encoder(50, 32, 4, 64, 1), kl.Encoder(50, 32, 4, 64, 1)
    weight = first.encoder.blocks[0].feedforward.f.input.weight
    assert not torch.equal(weight, second.encoder.blocks[0].feedforward.f.input.weight)
    before = weight.clone()
    with torch.no_grad():
        weight.zero_()
    assert torch.equal(first.initialize().encoder.blocks[0].feedforward.f.input.weight, before)


def test_equal_matrices_of_one_model_differ() -> None:
    state = kl.Encoder(50, 32, 4, 64, 2, "post_ln").state_dict()
    query, key, value = state["encoder.blocks.0.self_attention.f.query_key_value.weight"].chunk(3)
    above = state["encoder.blocks.1.self_attention.f.query_key_value.weight"].chunk(3)[0]
    assert len({matrix.sum().item() for matrix in (query, key, value, above)}) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_hold_the_rounded_fp32_weights(dtype: torch.dtype) -> None:
    single, other = build("deepnorm").state_dict(), build("deepnorm", dtype=dtype).state_dict()
    assert all(torch.equal(weight.to(dtype), other[name]) for name, weight in single.items())


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_torchs_default_dtype_does_not_change_the_weights(default: torch.dtype) -> None:
    plain = build("deepnorm", dtype=torch.float32).state_dict()
    torch.set_default_dtype(default)
    try:
        other = build("deepnorm", dtype=torch.float32).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(weight, other[name]) for name, weight in plain.items())


def test_a_seed_of_ones_own_takes_no_number_from_torch() -> None:
    before = torch.get_rng_state()
    first, second = (
        kl.build_model(kl.ModelConfig(layers=1, dim=16, heads=2, ffn_dim=32, vocab_size=9), seed=5) for _ in range(2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_materialize_takes_a_dtype() -> None:
    model = build("admin", device="meta").materialize("cpu", torch.bfloat16)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}
    direct = build("admin", dtype=torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), direct.parameters(), strict=True))
