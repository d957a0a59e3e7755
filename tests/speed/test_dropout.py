"""Dropout in the fast form: the plain formula, handed the masks that the fast form drew, computes the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kilolayer.layers.attention import Attention
from kilolayer.layers.mask import Mask
from kilolayer.layers.sublayer import Sublayer
from kilolayer.moe.layer import SparseFeedForward
from kilolayer.speed.compiler import Recompute
from kilolayer.speed.fast import fast_form
from kilolayer.speed.fast_layer import DRAWS
from kilolayer.speed.fast_stack import FastStack
from kilolayer.speed.operators import random_bits
from kilolayer.speed.operators.fused_norm import residual_norm
from tests.speed.plain_and_fast import SOURCE, SPARSE, Results, assert_equal, build, run

pytestmark = pytest.mark.usefixtures("every_operator")
DROPOUT = {"dropout": 0.3, "attention_dropout": 0.2, "activation_dropout": 0.4}
CASES: list[Any] = [
    ("deepnorm", {}),
    ("deepnorm", {"kv_heads": 1, "norm": "rms"}),
    ("admin", {}),
    ("pre_ln", {}),
    ("sub_ln", {}),
    ("sub_ln", {"moe": SPARSE}),
]


class KnownDropout(nn.Module):
    """Drops the elements that a seed says."""

    def __init__(self, seed: Tensor, p: float) -> None:
        super().__init__()
        self.seed, self.p = seed, p

    def forward(self, x: Tensor) -> Tensor:
        return x * random_bits.keep_mask(self.seed, x.shape, self.p) / (1 - self.p)


def mix_with_known_dropout(f: Attention, seed: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
    """drop(softmax(q k^T / sqrt(head width) + mask)) v, written out."""
    key, value = (part.repeat_interleave(f.heads // f.key_heads, dim=1) for part in (key, value))
    scores = query @ key.mT / f.head_dim**0.5
    if mask.causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    scores = scores if mask.values is None else scores + mask.values
    weights = scores.softmax(dim=-1)
    return (weights * random_bits.keep_mask(seed, weights.shape, f.dropout) / (1 - f.dropout)) @ value


def seeds_of(stack: nn.Module) -> Tensor:
    """Known ones for each layer and sublayer: [layers, sublayers, DRAWS]."""
    blocks: Any = stack.blocks
    shape = (len(blocks), len(blocks[0].sublayers()), DRAWS)
    first = 1000 if stack.side == "encoder" else 2000
    return torch.arange(first, first + torch.Size(shape).numel()).view(shape) * 0x1234567


def with_known_masks(model: Any) -> Any:
    """A copy of a plain model that drops by `seeds_of` its stacks; what is drawn at the input stays torch's."""
    twin = copy.deepcopy(model)
    for stack in twin.stacks():
        for block, layer_seeds in zip(stack.blocks, seeds_of(stack), strict=True):
            for sublayer, (inside, on_branch) in zip(block.sublayers(), layer_seeds, strict=True):
                if not _ends_before_a_router(block, sublayer):
                    sublayer.dropout = KnownDropout(on_branch, DROPOUT["dropout"])
                f = sublayer.f
                if isinstance(f, Attention):
                    f.mix = partial(mix_with_known_dropout, f, inside)  # pyright: ignore[reportAttributeAccessIssue]
                else:
                    getattr(f, "experts", f).dropout = KnownDropout(inside, DROPOUT["activation_dropout"])
    return twin


def _ends_before_a_router(block: Any, sublayer: Sublayer) -> bool:
    """Whether no kernel joins the branch, because a router normalizes the precise state: then torch's dropout draws."""
    *others, last = block.sublayers()
    return isinstance(last.f, SparseFeedForward) and bool(others) and sublayer is others[-1] and last.plan.pre_norm


@pytest.fixture
def known_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FastStack, "_draw_seeds", lambda stack, reasons, device: seeds_of(stack))


def seeded_run(model: Any, seed: int = 7) -> Results:
    torch.manual_seed(seed)
    return run(model)


@pytest.mark.matrix(3)
@pytest.mark.usefixtures("known_seeds")
@pytest.mark.parametrize(("recipe", "options"), CASES, ids=["deepnorm", "grouped", "admin", "pre_ln", "sub_ln", "sparse"])
@pytest.mark.parametrize("drop_path", [0.0, 0.4])
def test_the_plain_formula_with_the_same_masks(recipe: str, options: dict[str, Any], drop_path: float) -> None:
    model = build("encoder_decoder", recipe, drop_path=drop_path, **DROPOUT, **options)
    assert_equal(seeded_run(fast_form(model)), seeded_run(with_known_masks(model)))


@pytest.mark.usefixtures("known_seeds")
@pytest.mark.parametrize("shape", ["encoder", "decoder"])
def test_one_stack_alone(shape: str) -> None:
    model = build(shape, "sub_ln", **DROPOUT)
    assert_equal(seeded_run(fast_form(model)), seeded_run(with_known_masks(model)))


@pytest.mark.matrix(2)
@pytest.mark.parametrize("what", ["selective", "layer"])
@pytest.mark.parametrize("options", [{}, {"moe": SPARSE}], ids=["dense", "sparse"])
def test_what_is_recomputed_drops_the_same(what: Recompute, options: dict[str, Any]) -> None:
    model = build("encoder_decoder", "deepnorm", drop_path=0.3, **DROPOUT, **options)
    assert_equal(seeded_run(fast_form(model, what)), seeded_run(fast_form(model)))


@pytest.mark.matrix(3)
@pytest.mark.parametrize("what", ["none", "selective", "layer"])
@pytest.mark.parametrize("recipe", ["pre_ln", "sub_ln"])
def test_gradients_are_those_of_the_forward_that_was_drawn(recipe: str, what: Recompute) -> None:
    """By finite differences: where layers are recomputed whole, these recipes draw other masks than where they are kept."""
    model = build("encoder", recipe, activation="gelu", drop_path=0.3, **DROPOUT)
    form, weights = fast_form(model, what), list(model.parameters())
    directions = [torch.randn_like(weight) for weight in weights]

    def loss(distance: float) -> Tensor:
        with torch.no_grad():
            for weight, direction in zip(weights, directions, strict=True):
                weight += distance * direction
        torch.manual_seed(3)
        return form(torch.arange(1, 11).view(2, 5)).logits.logsumexp(-1).sum()

    loss(0.0).backward()
    slope = sum(float((w.grad * way).sum()) for w, way in zip(weights, directions, strict=True) if w.grad is not None)
    ahead, behind = float(loss(1e-6).detach()), float(loss(-2e-6).detach())
    assert (ahead - behind) / 2e-6 == pytest.approx(slope, rel=1e-5)


def test_each_forward_draws_anew_and_the_same_seed_the_same() -> None:
    form = fast_form(build("encoder_decoder", "sub_ln", **DROPOUT))
    first, second, again = seeded_run(form), run(form), seeded_run(form)
    assert not torch.allclose(first.logits, second.logits)
    assert torch.equal(first.logits, again.logits)
    assert not torch.allclose(first.logits, seeded_run(form, 8).logits)


def test_a_restored_generator_goes_on_as_before() -> None:
    form = fast_form(build("encoder_decoder", "sub_ln", **DROPOUT))
    run(form)
    state = torch.get_rng_state()
    expected = [run(form).logits for _ in range(3)]
    torch.set_rng_state(state)
    assert all(torch.equal(run(form).logits, logits) for logits in expected)


def captured_seeds(form: Any, monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Those that each branch is dropped by, in the order of the forward."""
    seen: list[int | None] = []

    def capture(*arguments: Any) -> Any:
        seed = arguments[10]
        seen.append(None if seed is None else int(seed))
        return residual_norm(*arguments)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr("kilolayer.speed.fast_layer.residual_norm", capture)
        form(torch.arange(1, 11).view(2, 5))
    return seen


def test_each_draw_of_a_forward_has_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    form = fast_form(build("encoder", "deepnorm", layers=6, **DROPOUT))
    seeds = form.encoder._draw_seeds([None] * len(form.encoder.blocks), torch.device("cpu"))
    assert seeds.shape == (6, 2, DRAWS)
    assert seeds.unique().numel() == seeds.numel()
    seen = captured_seeds(form, monkeypatch) + captured_seeds(form, monkeypatch)
    assert len(seen) == 2 * 6 * 2
    assert len(set(seen)) == len(seen)


def test_layers_draw_independently() -> None:
    """Two masks agree in as many elements as independent ones do, within five deviations."""
    p, count = 0.3, 40_000
    stack = fast_form(build("encoder", "deepnorm", layers=4, **DROPOUT)).encoder
    seeds = torch.cat([stack._draw_seeds([None] * len(stack.blocks), torch.device("cpu")).flatten() for _ in range(2)])
    masks = torch.stack([random_bits.keep_mask(seed, (count,), p) for seed in seeds]).double() - (1 - p)
    correlation = masks @ masks.mT / count
    others = correlation[~torch.eye(len(seeds), dtype=torch.bool)]
    assert float(others.abs().max()) < 5 * p * (1 - p) / count**0.5


@pytest.mark.parametrize("evaluate", [lambda model, form: model.eval(), lambda model, form: form.eval()], ids=["plain", "fast"])
def test_nothing_is_dropped_in_evaluation(evaluate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("encoder", "deepnorm", drop_path=0.3, **DROPOUT)
    form = fast_form(model)
    evaluate(model, form)
    assert captured_seeds(form, monkeypatch) == [None] * 6
    assert torch.equal(seeded_run(form).logits, seeded_run(form, 8).logits)


def test_a_layer_that_does_not_train_leaves_the_others_their_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    form = fast_form(build("encoder", "deepnorm", **DROPOUT))
    form.encoder.blocks[0].eval()
    assert None not in captured_seeds(form, monkeypatch)[2:]


@torch.no_grad()
@pytest.mark.parametrize("kind", [nn.Dropout, Attention])
def test_a_first_layer_that_drops_nothing_leaves_the_others_their_dropout(kind: type[nn.Module]) -> None:
    model = build("encoder", **DROPOUT)
    for module in model.modules():
        if isinstance(module, nn.Dropout) and (kind is Attention or module is model.encoder.dropout):
            module.p = 0.0
        elif isinstance(module, Attention) and kind is nn.Dropout:
            module.dropout = 0.0
    first = model.encoder.blocks[0]
    for module in first.modules():
        if isinstance(module, kind):
            module.eval()
    form = fast_form(model)
    one, other = (form(SOURCE, hidden_states=True).hidden_states for _ in range(2))
    assert torch.equal(one[1], other[1])
    assert not torch.equal(one[2], other[2])
