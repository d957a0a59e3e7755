"""A head on an encoder: what it reads, how it starts, and that every form of a model keeps it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.config import build, table_of
from kilolayer.errors import InputError, OptionError
from kilolayer.models.config import ModelConfig
from kilolayer.runs.budget import Work, budget

SIZES: dict[str, Any] = {"vocab_size": 11, "dim": 16, "heads": 2, "ffn_dim": 24, "layers": 2}
TOKENS = torch.tensor([[2, 5, 7, 3, 0, 0], [2, 9, 8, 7, 6, 3], [0, 0, 0, 0, 0, 0]])


def encoder(recipe: str = "deepnorm", dtype: torch.dtype = torch.float64, **head: Any) -> kl.Encoder:
    torch.manual_seed(0)
    model = kl.Encoder(**SIZES, recipe=recipe, head=kl.Head(**{"outputs": 3, "dropout": 0.0, **head}), dtype=dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return model.eval()


@pytest.mark.parametrize("pool", ["first", "mean"])
def test_a_head_reads_the_first_state_or_the_mean_of_the_real_ones(pool: str) -> None:
    model = encoder(pool=pool)
    out = model(TOKENS)
    assert out.logits is not None
    weights = {name: weight.detach() for name, weight in model.named_parameters() if name.startswith("head.")}
    for row, length in ((0, 4), (1, 6)):
        states = out.states[row, :length]
        pooled = states[0] if pool == "first" else sum(states[position] for position in range(length)) / length
        hidden = torch.tanh(weights["head.dense.weight"] @ pooled + weights["head.dense.bias"])
        expected = weights["head.output.weight"] @ hidden + weights["head.output.bias"]
        torch.testing.assert_close(out.logits[row], expected, rtol=1e-12, atol=1e-12)
    assert out.logits.shape == (3, 3)
    assert out.logits.isfinite().all()  # of a row that only fills up the batch too


def test_padding_changes_no_score() -> None:
    for pool in ("first", "mean"):
        model = encoder(pool=pool)
        torch.testing.assert_close(model(TOKENS).logits[0], model(TOKENS[:1, :4]).logits[0], rtol=1e-12, atol=1e-12)


def test_a_head_takes_the_place_of_the_vocabularys_scores() -> None:
    names = [name for name, _ in encoder().named_parameters() if not name.startswith("encoder.")]
    parts = ("dense.weight", "dense.bias", "output.weight", "output.bias")
    assert names == ["embedding.weight", *(f"head.{part}" for part in parts)]


def test_a_head_starts_as_xavier_says_without_bias() -> None:
    head = kl.Encoder(**{**SIZES, "dim": 256}, head=kl.Head(outputs=128)).head
    assert head is not None
    assert head.dense.weight.std().item() == pytest.approx((2 / 512) ** 0.5, rel=0.02)
    assert head.output.weight.std().item() == pytest.approx((2 / 384) ** 0.5, rel=0.02)
    assert not head.dense.bias.any()
    assert not head.output.bias.any()


def test_dropout_stands_before_the_scores() -> None:
    model = encoder(dropout=0.5)
    assert torch.equal(model(TOKENS).logits, model(TOKENS).logits)
    model.train()
    assert not torch.equal(model(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16])
def test_a_lowered_model_keeps_its_head_precise(residual: torch.dtype) -> None:
    model = encoder(dtype=torch.float32, pool="mean")
    precise = model(TOKENS).logits
    changed = model.cast_weights(torch.bfloat16, residual)
    assert {weight.dtype for weight in model.head.parameters()} == {torch.float32}
    assert not set(changed) & set(model.head.parameters())
    logits = model(TOKENS).logits
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits[:2], precise[:2], rtol=0, atol=0.1)
    logits.sum().backward()
    assert all(weight.grad is not None and weight.grad.dtype == weight.dtype for weight in model.parameters())


@pytest.mark.parametrize("pool", ["first", "mean"])
def test_the_fast_form_and_the_folded_form_give_the_same_scores(pool: str) -> None:
    model = encoder(pool=pool)
    expected = model(TOKENS).logits
    torch.testing.assert_close(kl.fast(model)(TOKENS).logits, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kl.fold(model)(TOKENS).logits, expected, rtol=1e-9, atol=1e-9)


def test_a_model_with_trained_residual_vectors_is_folded_with_its_head() -> None:
    recipe = kl.recipes.get("admin", weight="trainable")
    model = kl.Encoder(**SIZES, recipe=recipe, head=kl.Head(), positions="rotary", dtype=torch.float64).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    torch.testing.assert_close(kl.fold(model)(TOKENS).logits[:2], model(TOKENS).logits[:2], rtol=1e-9, atol=1e-9)


def test_a_head_survives_the_configuration_and_a_state_dict() -> None:
    model = encoder(pool="mean", dropout=0.25)
    config = build(ModelConfig, table_of(model.config))
    assert config == model.config
    other = kl.build_model(config, dtype=torch.float64).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(TOKENS).logits, model(TOKENS).logits)


def test_the_plan_counts_the_head_and_no_scores_of_a_vocabulary() -> None:
    model = encoder()
    work = Work(batch=4, length=6, precision="fp32")
    cost, bare = budget(model.config, work), budget(ModelConfig(shape="encoder", **SIZES), work)
    assert cost.parts["head"] == 16 * 16 + 16 + 3 * 16 + 3
    assert cost.parameters == sum(weight.numel() for weight in model.parameters())
    assert cost.training.logits == 4 * 3 * 4
    tokens = 4 * 6
    of_vocabulary, of_head = 2 * tokens * 16 * 11, 2 * 4 * (16 * 16 + 16 * 3)
    difference = tokens * (bare.forward_flops_per_token - cost.forward_flops_per_token)
    assert difference == pytest.approx(of_vocabulary - of_head)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": "decoder", "head": {}}, "the shape 'decoder' cannot have a head"),
        ({"shape": "encoder", "head": {}, "tie_embeddings": False}, "tie_embeddings has no effect"),
        ({"shape": "encoder", "head": {"pool": "last"}}, "pool is 'last'"),
        ({"shape": "encoder", "head": {"outputs": 0}}, "outputs is 0"),
        ({"shape": "encoder", "head": {"output": 2}}, "did you mean 'outputs'"),
    ],
)
def test_heads_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        build(ModelConfig, options)


def test_a_head_leaves_no_places_to_score() -> None:
    with pytest.raises(InputError, match="positions has no effect on a model with a head"):
        encoder()(TOKENS, positions=torch.zeros(3, 1, dtype=torch.int64))


def test_images_have_heads_without_a_vocabulary() -> None:
    model = kl.Encoder(None, 16, 2, 24, 2, head=kl.Head(outputs=5, pool="mean"))
    out = model(embeddings=torch.randn(2, 7, 16))
    assert out.logits is not None
    assert out.logits.shape == (2, 5)
