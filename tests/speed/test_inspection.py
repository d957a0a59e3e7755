"""Hooks and modules of a user's own: such a layer runs as the plain module that it is, and the others stay fast."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import kilolayer as kl
from kilolayer.errors import InputError, OptionError
from kilolayer.layers.feedforward import FeedForward
from kilolayer.layers.norms.layer import LayerNorm
from kilolayer.layers.stream import LayerOutput
from kilolayer.layers.sublayer import Sublayer
from kilolayer.speed.fast import fast_form, unfused_residuals
from kilolayer.speed.fast_layer import run_layer
from kilolayer.speed.runtime import fast
from tests.speed.plain_and_fast import SPARSE, assert_equal, build, run

LAYERS = 3


@pytest.fixture
def ran_fast(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The layers that have run through operators, in their order."""
    seen: list[nn.Module] = []

    def noted(block: Any, *rest: Any) -> Any:
        seen.append(block)
        return run_layer(block, *rest)

    monkeypatch.setattr("kilolayer.speed.compiler.run_layer", noted)
    return seen


def small(recipe: str = "pre_ln", **options: Any) -> Any:
    return build("encoder", recipe, **options)


def assert_plain(model: Any, form: Any, plain: set[int], ran_fast: list[nn.Module]) -> None:
    """The numbers are the plain model's, and all layers but these ran through operators."""
    ran_fast.clear()
    found = run(form)
    assert ran_fast == [block for index, block in enumerate(model.encoder.blocks) if index not in plain]
    assert_equal(found, run(model))


HOOKED = [
    "",
    "self_attention",
    "self_attention.pre_norm",
    "self_attention.f",
    "feedforward.f.input",
    "feedforward.f.activation",
]


@pytest.mark.matrix(3)
@pytest.mark.usefixtures("every_operator")
@pytest.mark.parametrize("where", HOOKED)
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
def test_a_forward_hook_is_called_once(where: str, layer: int, later: bool, ran_fast: list[nn.Module]) -> None:
    model, calls = small(), []
    form = fast_form(model) if later else None
    module = model.encoder.blocks[layer].get_submodule(where)
    handle = module.register_forward_hook(lambda *_: calls.append(where))
    form = fast_form(model) if form is None else form
    run(form)
    assert len(calls) == 1
    assert_plain(model, form, {layer}, ran_fast)
    handle.remove()
    assert_plain(model, form, set(), ran_fast)


@pytest.mark.usefixtures("every_operator")
@pytest.mark.parametrize("kind", ["forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_other_hooks_are_called_once(kind: str, ran_fast: list[nn.Module]) -> None:
    model, calls = small(), []
    form = fast_form(model)
    getattr(model.encoder.blocks[1].feedforward.f, f"register_{kind}")(lambda *_: calls.append(kind))
    run(form)
    assert len(calls) == 1
    assert_plain(model, form, {1}, ran_fast)


@pytest.mark.usefixtures("every_operator")
def test_a_hook_may_change_what_it_sees(ran_fast: list[nn.Module]) -> None:
    model = small()
    form, before = fast_form(model), run(model)
    model.encoder.blocks[2].feedforward.f.register_forward_hook(lambda _, __, output: 3 * output)
    assert_plain(model, form, {2}, ran_fast)
    assert not torch.allclose(run(form).logits, before.logits)


@pytest.mark.usefixtures("every_operator")
def test_a_hook_on_all_modules(ran_fast: list[nn.Module]) -> None:
    model, seen = small(), set()
    form = fast_form(model)
    handle = register_module_forward_hook(lambda module, *_: seen.add(module))
    try:
        assert_plain(model, form, {0, 1, 2}, ran_fast)
        assert {module for block in model.encoder.blocks for module in block.modules()} - seen == set()
    finally:
        handle.remove()
    assert_plain(model, form, set(), ran_fast)


class TwiceTheBranch(Sublayer):
    def forward(self, x: Tensor, *seen: Any) -> Tensor:
        return x + 2 * self.f(self.pre_norm(x), *seen)


class Squared(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.input(x).relu().square())


class Halved(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


class Bare(nn.Module):
    """A sublayer that shares nothing with ours but what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16, dtype=torch.float64) / 3)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x + x @ self.weight


class BareLayer(Bare):
    def forward(self, x: Tensor, *_: Any) -> Any:
        return LayerOutput(super().forward(x))


def replace_sublayer(model: Any, layer: int) -> None:
    block = model.encoder.blocks[layer]
    own = TwiceTheBranch(block.self_attention.f, model.config, block.self_attention.plan).double()
    own.pre_norm = block.self_attention.pre_norm
    block.self_attention = own


def replace_function(model: Any, layer: int) -> None:
    sublayer = model.encoder.blocks[layer].feedforward
    own = Squared(model.config, sublayer.plan).double()
    own.load_state_dict(sublayer.f.state_dict())
    sublayer.f = own


def replace_norm(model: Any, layer: int) -> None:
    own = Halved(16, dtype=torch.float64)
    model.encoder.blocks[layer].self_attention.pre_norm = own


def replace_forward(model: Any, layer: int) -> None:
    f = model.encoder.blocks[layer].feedforward.f
    f.forward = lambda x: 3 * FeedForward.forward(f, x)


def replace_by_a_bare_attention(model: Any, layer: int) -> None:
    model.encoder.blocks[layer].self_attention = Bare()


def replace_by_a_bare_network(model: Any, layer: int) -> None:
    model.encoder.blocks[layer].feedforward = Bare()


def replace_layer(model: Any, layer: int) -> None:
    model.encoder.blocks[layer] = BareLayer()


# What the first layer holds tells the plain stack its dtype: there its attention has to be one.
PARTS = (replace_sublayer, replace_function, replace_norm, replace_forward, replace_by_a_bare_network)
REPLACED: list[tuple[Callable[[Any, int], None], int]] = [
    *((replace, layer) for replace in PARTS for layer in (0, 1)),
    *((replace, layer) for replace in (replace_by_a_bare_attention, replace_layer) for layer in (1, 2)),
]


@pytest.mark.matrix(3)
@pytest.mark.usefixtures("every_operator")
@pytest.mark.parametrize(("replace", "layer"), REPLACED, ids=lambda each: getattr(each, "__name__", str(each)))
@pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("dropout", [0.0, 1e-12], ids=["kept", "dropped"])
def test_a_module_of_your_own(
    replace: Callable[[Any, int], None], layer: int, later: bool, dropout: float, ran_fast: list[nn.Module]
) -> None:
    model = small(dropout=dropout)
    form = fast_form(model) if later else None
    replace(model, layer)
    plain = set() if replace is replace_norm else {layer}  # a fast layer calls a norm that it does not know
    assert_plain(model, fast_form(model) if form is None else form, plain, ran_fast)


@pytest.mark.usefixtures("every_operator")
@pytest.mark.parametrize("recipe", ["deepnorm", "sub_ln"])
def test_a_hook_in_a_sparse_model(recipe: str, ran_fast: list[nn.Module]) -> None:
    model, calls = small(recipe, moe=SPARSE), []
    form = fast_form(model)
    model.encoder.blocks[1].feedforward.f.experts.register_forward_hook(lambda *_: calls.append(1))
    run(form)
    assert len(calls) == 1
    assert_plain(model, form, {1}, ran_fast)


@pytest.mark.usefixtures("every_operator")
def test_each_stack_says_once_why(caplog: pytest.LogCaptureFixture) -> None:
    model = build("encoder_decoder")
    form = fast_form(model)
    with caplog.at_level(logging.WARNING):
        run(form)
        assert caplog.messages == []
        for layer in (0, 1):
            model.encoder.blocks[layer].feedforward.f.register_forward_hook(lambda *_: None)
        model.decoder.blocks[1].register_forward_hook(lambda *_: None)
        run(form)
        run(form)
    assert caplog.messages == [
        "layers of the encoder run as plain modules, because a hook is registered on Block.feedforward.f",
        "layers of the decoder run as plain modules, because a hook is registered on CrossBlock",
    ]
    with caplog.at_level(logging.WARNING):
        model.encoder.blocks[2].self_attention.f.forward = model.encoder.blocks[2].self_attention.f.forward
        run(form)
    assert caplog.messages[2:] == [
        "layers of the encoder run as plain modules, because the forward of self_attention.f was replaced"
    ]


def test_the_same_parameters_under_the_same_names() -> None:
    model = build("encoder_decoder", "admin", moe=SPARSE, tie_embeddings=False)
    form = fast_form(model)
    ours, theirs = form.state_dict(keep_vars=True), model.state_dict(keep_vars=True)
    assert list(ours) == list(theirs)
    assert all(ours[name] is theirs[name] for name in ours)
    assert [id(weight) for weight in form.parameters()] == [id(weight) for weight in model.parameters()]


@pytest.mark.usefixtures("every_operator")
@pytest.mark.parametrize("through", ["plain", "fast"])
def test_weights_are_loaded_and_stepped_through_either(through: str) -> None:
    model, other = small(), small()
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.1
    form = fast_form(model)
    one = model if through == "plain" else form
    one.load_state_dict(other.state_dict())
    assert_equal(run(form), run(other))
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    expected = torch.optim.SGD(other.parameters(), lr=0.1)
    run(form)
    run(other)
    optimizer.step()
    expected.step()
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("through", ["plain", "fast"])
def test_a_model_is_lowered_through_either(through: str) -> None:
    model = build("encoder", dtype=torch.float32)
    form = fast_form(model)
    (model if through == "plain" else form).cast_weights(torch.bfloat16)
    with torch.no_grad():
        states = [each(torch.ones(1, 2, dtype=int), hidden_states=True).hidden_states for each in (model, form)]
    for ours, theirs in zip(*states, strict=True):
        assert ours.dtype == theirs.dtype == torch.float32


class Classifier(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.trunk = nn.Sequential(encoder)
        self.head = nn.Linear(16, 3, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.trunk(tokens).states[:, 0])


@pytest.mark.usefixtures("every_operator")
def test_a_module_that_holds_a_model(ran_fast: list[nn.Module]) -> None:
    encoder, tokens = small(), torch.arange(1, 11).view(2, 5)
    plain = Classifier(encoder)
    form = fast_form(plain)
    torch.testing.assert_close(form(tokens), plain(tokens), rtol=1e-9, atol=1e-9)
    assert ran_fast == list(encoder.encoder.blocks)
    assert isinstance(form, Classifier)
    assert form.head is plain.head
    assert list(form.state_dict()) == list(plain.state_dict())


@torch.no_grad()
@pytest.mark.parametrize("layers", [2, 5])
def test_layers_may_be_removed_and_added_later(layers: int) -> None:
    plain, tokens = kl.Encoder(50, 16, 2, 32, 3).eval(), torch.tensor([[5, 7, 3]])
    form = fast(plain)
    assert torch.equal(form(tokens).states, plain(tokens).states)
    plain.encoder.blocks = kl.Encoder(50, 16, 2, 32, layers).eval().encoder.blocks
    assert torch.equal(form(tokens).states, plain(tokens).states)


def test_a_module_without_layers_is_refused() -> None:
    with pytest.raises(InputError, match="no stack of layers"):
        fast(nn.Linear(2, 2))
    with pytest.raises(InputError, match="not a model: 'runs/mine'"):
        fast("runs/mine")  # pyright: ignore[reportArgumentType]


def test_on_the_cpu_it_says_so_once_and_runs_the_plain_layers(
    caplog: pytest.LogCaptureFixture, ran_fast: list[nn.Module]
) -> None:
    model = small()
    with caplog.at_level(logging.WARNING):
        form = fast(model)
        assert_equal(run(form), run(model), 0.0)
        run(form)
    assert caplog.messages == ["layers run as plain modules, because the model is on cpu"]
    assert ran_fast == []


def test_the_fast_form_of_a_fast_form_is_itself() -> None:
    form = fast_form(kl.Encoder(11, 16, 2, 24, 2))
    assert fast_form(form).encoder is form.encoder


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("deepnorm", None),
        ("sub_ln", None),
        ("rezero", "the scale of their branch is learned"),
        ("layer_scale", "the scale of their branch is learned"),
        ("lns", "what their functions read is scaled after its norm"),
        ("keel", None),
        ("t_fixup", "no norm stands on their residual"),
    ],
)
def test_an_option_that_no_kernel_serves_is_named(recipe: str, reason: str | None) -> None:
    form = fast_form(kl.Encoder(50, 16, 2, 32, 2, recipe))
    assert unfused_residuals(form) == []
    form.cast_weights(torch.bfloat16)
    expected = [] if reason is None else [f"layers of the encoder add their residuals without a kernel, because {reason}"]
    assert unfused_residuals(form) == expected


def test_an_unknown_recomputation_is_named() -> None:
    with pytest.raises(OptionError, match="'al'"):
        fast(kl.Encoder(50, 16, 2, 32, 2), recompute="al")  # pyright: ignore[reportArgumentType]


def test_a_fast_form_has_a_form_that_recomputes() -> None:
    form = fast_form(kl.Encoder(50, 16, 2, 32, 2))
    other = fast_form(form, "layer")
    assert fast_form(form) is form
    assert (form.encoder.recompute, other.encoder.recompute) == ("none", "layer")
    assert other.encoder.blocks is form.encoder.blocks
