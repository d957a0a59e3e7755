"""The fast form of an encoder of two modalities (`model.multiway`) against the plain one, on the same parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.layers.norms.layer import LayerNorm
from kilolayer.speed.compiler import Recompute
from kilolayer.speed.fast import compile_layers, fast_form, unfused_residuals
from kilolayer.speed.fast_stack import FastStack
from kilolayer.speed.operators import kernels
from tests.speed.plain_and_fast import SIZES, assert_close, assert_equal, build, errors, exact_form, run

pytestmark = pytest.mark.filterwarnings("default")  # the compiler warns about itself
LENGTH = 6
HALF: dict[str, Any] = {"dim": 64, "heads": 4, "ffn_dim": 128, "layers": 4}
DROPOUT: dict[str, Any] = {"drop_path": 0.3, "dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}
each_recipe = pytest.mark.parametrize("recipe", kl.recipes.names())
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("sub_ln", {"positions": "rotary", "qk_norm": True}),
    ("deepnorm", {"positions": "t5", "kv_heads": 1}),
    ("pre_ln", {"positions": "learned", "max_length": 8, "norm": "rms"}),
    ("sub_ln", {"activation": "swiglu", "norm": "rms"}),
    ("deepnorm", {"activation": "gelu", "embedding_norm": True}),
    ("pre_ln", {"final_norm": False}),
]


def served(form: Any) -> list[str | None]:
    """Why each layer of the form would run as a plain module."""
    (stack,) = form.stacks()
    assert isinstance(stack, FastStack)
    return stack._why_plain()


@pytest.mark.matrix(10)
@pytest.mark.usefixtures("every_operator")
@pytest.mark.parametrize("split", [0, 1, 4, LENGTH])
@each_recipe
def test_every_recipe(recipe: str, split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("encoder", recipe, multiway=2)
    form, expected = fast_form(model), run(model, split=split)
    assert served(form) == [None] * 3
    assert_equal(run(form, split=split), expected)
    monkeypatch.setattr("kilolayer.speed.fast_stack.can_run_short_attention", lambda *_: False)
    assert_equal(run(form, split=split), expected)


@pytest.mark.matrix(3)
@pytest.mark.usefixtures("every_operator")
@pytest.mark.parametrize(("recipe", "options"), OPTIONS, ids=str)
def test_every_option(recipe: str, options: dict[str, Any]) -> None:
    model = build("encoder", recipe, multiway=2, **options)
    assert_equal(run(fast_form(model), split=2), run(model, split=2))


@pytest.mark.matrix(3)
@pytest.mark.usefixtures("every_operator")
@pytest.mark.parametrize("what", ["selective", "layer"])
@pytest.mark.parametrize("recipe", ["deepnorm", "pre_ln", "resi_dual"])
def test_a_recomputation_after_the_pass_of_another_batch(recipe: str, what: Recompute) -> None:
    model = build("encoder", recipe, multiway=2)
    plain_blocks = fast_form(model, what)
    plain_blocks.encoder.blocks[1].register_forward_hook(lambda *_: None)  # the layer is then run as a plain module
    form = fast_form(build("encoder", recipe, multiway=2), what)
    tokens = torch.randint(1, SIZES["vocab_size"], (2, LENGTH))
    for each in (plain_blocks, form):
        each.zero_grad()
        loss = each(tokens, split=2).logits.square().sum()
        each(tokens, split=5)
        loss.backward()
    expected = build("encoder", recipe, multiway=2)
    expected(tokens, split=2).logits.square().sum().backward()
    gradients = {name: weight.grad for name, weight in expected.named_parameters()}
    for each in (plain_blocks, form):
        for name, weight in each.named_parameters():
            assert_close(weight.grad, gradients[name], 1e-9, name)


@pytest.mark.usefixtures("every_operator")
@torch.no_grad()
def test_modes_and_hidden_states() -> None:
    model = build("encoder", "pre_ln", multiway=2, **DROPOUT)
    form, tokens = fast_form(model), torch.randint(1, SIZES["vocab_size"], (2, LENGTH))
    trained = form(tokens, split=3).logits
    assert not torch.equal(trained, form(tokens, split=3).logits)
    found, expected = (each.eval()(tokens, split=3, hidden_states=True) for each in (form, model))
    for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert_close(ours, theirs, 1e-9, "hidden states")
    assert_close(found.logits, expected.logits, 1e-9, "logits")


@pytest.mark.usefixtures("every_operator")
def test_drop_path_skips_the_branch_of_whole_samples() -> None:
    model = build("encoder", "pre_ln", multiway=2, drop_path=0.5, layers=1)
    form, embeddings = fast_form(model), torch.ones(64, LENGTH, SIZES["dim"], dtype=torch.float64)
    states = form(embeddings=embeddings, split=3).states
    kinds = torch.unique(states.detach().flatten(1).mul(1e6).round(), dim=0)
    assert len(kinds) == 4  # each of two branches is kept or skipped; by parts, there would be up to sixteen


@pytest.mark.usefixtures("every_operator")
def test_a_replaced_module_is_run() -> None:
    model = build("encoder", "deepnorm", multiway=2)
    form, before = fast_form(model), run(model, split=2).logits
    run(form, split=2)
    f = model.encoder.blocks[1].feedforward.f
    f.output.B = type(f.output.B)(f.output.B.in_features, f.output.B.parts, f.output.B.plan).double()
    torch.nn.init.normal_(f.output.B.weight)
    torch.nn.init.normal_(f.output.B.bias)
    after = run(model, split=2).logits
    assert not torch.allclose(after, before)
    assert_close(run(form, split=2).logits, after, 1e-9, "logits")


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "options"), [("pre_ln", {}), ("deepnorm", {}), ("sub_ln", DROPOUT)], ids=str)
def test_a_layer_is_compiled_once_for_all_lengths_and_splits(recipe: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = kl.Encoder(11, 16, 2, 32, 3, recipe, multiway=2, **options).train()
    form = fast_form(model)
    compile_layers(form, "aot_eager")
    for rows, length, split in ((8, 16, 5), (4, 24, 20), (3, 40, 33), (5, 17, 17), (5, 18, 0)):
        batch = (torch.randint(1, 11, (rows, length)),)
        found = run(form, batch, split=split)
        if not options:
            assert_equal(found, run(model, batch, split=split), 1e-4)
    # One graph for two modalities and one for sequences of one.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_a_reason_against_the_fused_residual_is_named() -> None:
    model = build("encoder", "rezero", multiway=2, dtype=torch.float32)
    model.cast_weights(torch.bfloat16)
    assert "is learned" in unfused_residuals(fast_form(model))[0]
    assert not unfused_residuals(fast_form(build("encoder", "deepnorm", multiway=2)))


def excess_error(model: Any, form: Any, batches: int, device: str, split: int = 7) -> torch.Tensor:
    """The distance of a fast form from fp64 over that of the plain model, of logits and of gradients: [2]."""
    exact, found = exact_form(model), []
    for seed in range(batches):
        tokens = torch.randint(1, 11, (6, 20), generator=torch.Generator().manual_seed(seed))
        tokens[1, 15:] = 0
        batch = (tokens.to(device),)
        expected = run(exact, batch, split=split)
        found.append([errors(run(each, batch, split=split), expected) for each in (model, form)])
    plain, ours = torch.tensor(found).square().mean(dim=0).sqrt()
    return ours / plain


@pytest.mark.parametrize("recipe", ["deepnorm", "sub_ln"])
def test_half_precision_is_as_precise(recipe: str) -> None:
    model = build("encoder", recipe, multiway=2, dtype=torch.float32, activation="gelu", dim=32, ffn_dim=64, layers=2)
    model.cast_weights(torch.bfloat16)
    with kernels.assumed("cpu"):
        excess = excess_error(model, fast_form(model), 8, "cpu")
    assert (excess <= 1.5).all(), excess.tolist()


@pytest.mark.gpu
@each_recipe
def test_every_recipe_on_a_gpu(recipe: str) -> None:
    model = build("encoder", recipe, multiway=2, device="cuda", dtype=torch.float32, **HALF)
    batch = (torch.randint(1, 11, (6, 20), device="cuda"),)
    for split in (0, 7, 20):
        assert max(errors(run(fast_form(model), batch, split=split), run(model, batch, split=split))) < 0.05
    if any(isinstance(module, LayerNorm) for module in model.modules()):
        model.cast_weights(torch.bfloat16)
        excess = excess_error(model, fast_form(model), 32, "cuda")
        assert (excess <= 1.5).all(), excess.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["none", "selective", "layer"])
@pytest.mark.parametrize("recipe", ["deepnorm", "sub_ln"])
def test_compiled_on_a_gpu(recipe: str, what: Recompute) -> None:
    torch._dynamo.reset()
    model = build("encoder", recipe, multiway=2, device="cuda", dtype=torch.float32, **HALF)
    model.cast_weights(torch.bfloat16)
    form = fast_form(model, what)
    compile_layers(form)
    for split in (7, 12, 20):
        excess = excess_error(model, form, 32, "cuda", split)
        assert (excess <= 1.5).all(), excess.tolist()
