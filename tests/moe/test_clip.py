"""SparseClip against hand-computed numbers, torch's clipping, and a definition written out."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kilolayer as kl
from kilolayer.errors import InputError, OptionError
from kilolayer.moe.clip import clipping_norm
from kilolayer.moe.layer import expert_parameters


def build(moe: kl.MoE | None, **options: Any) -> kl.Decoder:
    torch.manual_seed(3)
    return kl.Decoder(11, 16, 2, 24, 4, recipe="sub_ln", moe=moe, **options).train()


def with_gradients(model: kl.Decoder) -> dict[str, Tensor]:
    out = model(torch.randint(1, 11, (3, 7), generator=torch.Generator().manual_seed(1)))
    (out.logits.logsumexp(-1).square().mean() + out.router_loss).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def norm_of(gradients: dict[str, Tensor], experts: bool) -> float:
    return math.sqrt(
        sum(float(value.double().square().sum()) for name, value in gradients.items() if ("experts" in name) == experts)
    )


def test_by_hand() -> None:
    model = build(kl.MoE(experts=4))
    table = model.embedding.weight
    router = model.get_parameter("decoder.blocks.1.feedforward.f.router.weight")
    matrices = model.get_parameter("decoder.blocks.3.feedforward.f.experts.input.weight")
    for weight in (table, router, matrices):
        weight.grad = torch.zeros_like(weight)
    assert table.grad is not None
    assert router.grad is not None
    assert matrices.grad is not None
    table.grad[0, 0], router.grad[0, 0] = 1.0, math.sqrt(8)
    matrices.grad[0, 0, 0], matrices.grad[3, 1, 2] = 6.4, 4.8
    norm = kl.clip_grad_norm_(model, 0.5)
    # Dense, router included: sqrt(1 + 8) = 3. Experts: 8, which count for 8 / sqrt(4) = 4. Together 5.
    assert float(norm.dense) == pytest.approx(3)
    assert float(norm.expert) == pytest.approx(8)
    assert float(norm.total) == pytest.approx(5)
    assert table.grad[0, 0].item() == pytest.approx(0.1)
    assert router.grad[0, 0].item() == pytest.approx(0.1 * math.sqrt(8))
    assert [matrices.grad[0, 0, 0].item(), matrices.grad[3, 1, 2].item()] == pytest.approx([0.64, 0.48])  # scaled like all


@pytest.mark.matrix(3)
@pytest.mark.parametrize("experts", [2, 4, 16])
@pytest.mark.parametrize("kind", ["auto", "sparse", "plain"])
def test_all_gradients_are_scaled_by_the_limit_over_the_norm(experts: int, kind: Any) -> None:
    model = build(kl.MoE(experts=experts))
    before = with_gradients(model)
    dense, expert = norm_of(before, False), norm_of(before, True)
    expected = math.hypot(dense, expert if kind == "plain" else expert / math.sqrt(experts))
    limit = expected / 3
    norm = kl.clip_grad_norm_(model, limit, kind)
    assert [float(norm.total), float(norm.dense), float(norm.expert)] == pytest.approx([expected, dense, expert], rel=1e-6)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, before[name] / 3, rtol=1e-5, atol=1e-9)


def test_gradients_within_the_limit_stay_as_they_are() -> None:
    model = build(kl.MoE(experts=4))
    before = with_gradients(model)
    dense, expert = norm_of(before, False), norm_of(before, True)
    between = (math.hypot(dense, expert / 2) + math.hypot(dense, expert)) / 2  # of the sparse and the plain norm
    kl.clip_grad_norm_(model, between)
    assert all(torch.equal(weight.grad, before[name]) for name, weight in model.named_parameters())  # pyright: ignore
    kl.clip_grad_norm_(model, math.inf)
    assert all(torch.equal(weight.grad, before[name]) for name, weight in model.named_parameters())  # pyright: ignore


@pytest.mark.matrix(3)
@pytest.mark.parametrize(("experts", "kind"), [(1, "auto"), (1, "sparse"), (1, "plain"), (8, "plain"), (None, "auto")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_expert_is_torchs_clipping_bit_by_bit(experts: int | None, kind: Any, dtype: torch.dtype) -> None:
    moe = None if experts is None else kl.MoE(experts=experts, top_k=1)
    ours, theirs = build(moe, dtype=dtype), build(moe, dtype=dtype)
    for model in (ours, theirs):
        with_gradients(model)
    norm, expected = kl.clip_grad_norm_(ours, 0.01, kind).total, nn.utils.clip_grad_norm_(theirs.parameters(), 0.01)
    assert float(expected) > 0.01
    assert torch.equal(norm, expected)
    for found, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        assert torch.equal(found.grad, wanted.grad)


def test_the_norm_of_both_parts() -> None:
    dense, expert = torch.tensor(3.0), torch.tensor(32.0)
    assert float(clipping_norm(dense, expert, 64)) == pytest.approx(5.0)
    assert float(clipping_norm(dense, torch.tensor(4.0), 1)) == pytest.approx(5.0)
    assert float(clipping_norm(dense, torch.tensor(0.0), 7)) == 3.0
    for bad in (math.nan, math.inf):
        assert not clipping_norm(torch.tensor(bad), expert, 64).isfinite()
        assert not clipping_norm(dense, torch.tensor(bad), 64).isfinite()


def test_the_norm_of_large_experts_is_exact_however_they_are_shared() -> None:
    model = kl.Decoder(11, 256, 2, 1024, 2, moe=kl.MoE(experts=4))
    generator = torch.Generator().manual_seed(1)
    gradients = {name: torch.randn(weight.shape, generator=generator) for name, weight in expert_parameters(model)}
    for name, weight in expert_parameters(model):
        weight.grad = gradients[name]
    assert float(kl.clip_grad_norm_(model, math.inf).expert) == pytest.approx(norm_of(gradients, True), rel=2e-7)


def test_sparse_clipping_of_a_dense_model_is_plain_and_says_so() -> None:
    ours, theirs = build(None), build(None)
    for model in (ours, theirs):
        with_gradients(model)
    with pytest.warns(UserWarning, match="this model has no experts") as told:
        norm = kl.clip_grad_norm_(ours, 0.01, "sparse")
    assert told[0].filename == __file__
    assert torch.equal(norm.total, nn.utils.clip_grad_norm_(theirs.parameters(), 0.01))
    assert float(norm.expert) == 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            kl.clip_grad_norm_(ours, 0.01, "sparse")
    assert len(caught) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_norms_that_are_not_finite_raise_nothing_as_in_torch(bad: float) -> None:
    ours, theirs = build(kl.MoE(experts=4)), build(kl.MoE(experts=4))
    for model in (ours, theirs):
        with_gradients(model)
        gradient = model.get_parameter("decoder.blocks.1.feedforward.f.experts.input.weight").grad
        assert gradient is not None
        gradient[0, 0, 0] = bad
    norm = kl.clip_grad_norm_(ours, 1.0)
    nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    assert not norm.total.isfinite()
    assert norm.dense.isfinite()
    for found, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        assert torch.equal(found.grad.isfinite(), wanted.grad.isfinite())


def test_without_gradients_there_is_nothing_to_clip() -> None:
    norm = kl.clip_grad_norm_(build(kl.MoE(experts=4)), 1.0)
    assert [float(norm.total), float(norm.dense), float(norm.expert)] == [0, 0, 0]


def test_mistakes_tell_the_fix() -> None:
    model = build(kl.MoE(experts=4))
    with pytest.raises(OptionError, match="did you mean 'sparse'"):
        kl.clip_grad_norm_(model, 1.0, "spars")  # pyright: ignore[reportArgumentType]
    for limit in (-1.0, math.nan, "1", None):
        with pytest.raises(OptionError, match="max_norm is"):
            kl.clip_grad_norm_(model, limit)  # pyright: ignore[reportArgumentType]


def test_parameters_are_not_a_model() -> None:
    with pytest.raises(InputError, match="give the model, not its parameters"):
        kl.clip_grad_norm_(torch.nn.Linear(2, 2).parameters(), 1.0)  # pyright: ignore[reportArgumentType]
