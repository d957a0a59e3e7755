"""The fast form of a model against the model itself, on the same parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.errors import OptionError
from kilolayer.layers.norms.layer import LayerNorm
from kilolayer.speed.compiler import Recompute
from kilolayer.speed.fast import compile_layers, fast_form
from kilolayer.speed.fast_stack import FastStack
from kilolayer.speed.operators import kernels
from kilolayer.speed.operators.fused_norm import residual_norm
from tests.speed.plain_and_fast import (
    SHAPES,
    SOURCE,
    SPARSE,
    TARGET,
    assert_close,
    assert_equal,
    build,
    errors,
    exact_form,
    run,
)

pytestmark = pytest.mark.filterwarnings("default")  # the compiler warns about itself
each_shape = pytest.mark.parametrize("shape", SHAPES)
each_recipe = pytest.mark.parametrize("recipe", kl.recipes.names())
each_sparsity = pytest.mark.parametrize("moe", [None, SPARSE], ids=["dense", "sparse"])
OPTIONS: list[tuple[str, Any, dict[str, Any]]] = [
    ("encoder_decoder", "deepnorm", {"positions": "rotary"}),
    ("decoder", "pre_ln", {"positions": "xpos"}),
    ("encoder_decoder", "sub_ln", {"positions": "t5"}),
    ("encoder_decoder", "deepnorm", {"positions": "learned", "max_length": 8}),
    ("encoder_decoder", "deepnorm", {"kv_heads": 1}),
    ("decoder", "pre_ln", {"kv_heads": 1, "positions": "rotary"}),
    ("encoder_decoder", "sub_ln", {"activation": "swiglu", "norm": "rms"}),
    ("encoder_decoder", "deepnorm", {"activation": "gelu"}),
    ("encoder_decoder", "pre_ln", {"norm": "rms", "final_norm": False}),
    ("encoder", "sub_ln", {"activation": "gelu", "moe": SPARSE, "norm": "rms"}),
    ("decoder", "sub_ln", {"moe": kl.MoE(experts=4, every=1, router="linear", capacity=1.0)}),
    ("encoder_decoder", "deepnorm", {"tie_embeddings": False, "source_vocab_size": 12}),
    ("encoder_decoder", {"name": "dlcl", "norm": "post"}, {}),
    ("encoder_decoder", {"name": "normformer", "residual_scale": True}, {}),
    ("encoder_decoder", {"name": "admin", "weight": "trainable"}, {}),
    ("encoder_decoder", {"name": "admin", "start": "released"}, {}),
    ("encoder_decoder", {"name": "resi_dual", "scale": 0.1}, {"norm": "rms"}),
]


def long_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is SDPA's."""
    monkeypatch.setattr("kilolayer.speed.fast_stack.can_run_short_attention", lambda *_: False)


@pytest.mark.matrix(12)
@pytest.mark.usefixtures("every_operator")
@each_recipe
@each_shape
@each_sparsity
def test_every_recipe_and_shape(shape: str, recipe: str, moe: kl.MoE | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(shape, recipe, moe=moe)
    form, expected = fast_form(model), run(model)
    assert all(isinstance(stack, FastStack) for stack in form.stacks())
    assert_equal(run(form), expected)
    long_attention(monkeypatch)
    assert_equal(run(form), expected)


@pytest.mark.matrix(2)
@pytest.mark.usefixtures("every_operator")
@pytest.mark.parametrize(("shape", "recipe", "options"), OPTIONS, ids=str)
def test_every_option(shape: str, recipe: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(shape, recipe, **options)
    form, expected = fast_form(model), run(model)
    assert_equal(run(form), expected)
    long_attention(monkeypatch)
    assert_equal(run(form), expected)


@pytest.mark.matrix(3)
@pytest.mark.usefixtures("every_operator")
@each_shape
@pytest.mark.parametrize("recipe", ["deepnorm", "sub_ln"])
def test_packed_documents(shape: str, recipe: str) -> None:
    model = build(shape, recipe)
    source_segments = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0]])
    target_segments = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2], [0, 0, 0, 0, 0]])
    options = {"segments": source_segments}
    if shape == "encoder_decoder":
        options = {"source_segments": source_segments, "target_segments": target_segments}
    assert_equal(run(fast_form(model), **options), run(model, **options))


@pytest.mark.matrix(2)
@pytest.mark.usefixtures("every_operator")
@each_sparsity
@pytest.mark.parametrize("recipe", ["deepnorm", "pre_ln", "sub_ln", "dlcl", "resi_dual", "b2t", "x0_residual"])
@torch.no_grad()
def test_hidden_states_and_routing_in_evaluation(recipe: str, moe: kl.MoE | None) -> None:
    model = build("encoder_decoder", recipe, moe=moe, dropout=0.3, attention_dropout=0.3, activation_dropout=0.3, drop_path=0.3)
    form = fast_form(model).eval()
    found, expected = (each(SOURCE, TARGET, hidden_states=True) for each in (form, model.eval()))
    for name, real in (("hidden_states", TARGET != 0), ("encoder_hidden_states", SOURCE != 0)):
        pairs = list(zip(getattr(found, name), getattr(expected, name), strict=True))
        assert len(pairs) == 4
        for index, (ours, theirs) in enumerate(pairs):
            assert_close(ours[real], theirs[real], 1e-9, f"{name} {index}")
    assert_close(found.logits[TARGET != 0], expected.logits[TARGET != 0], 1e-9, "logits")
    for ours, theirs in zip(found.routing or (), expected.routing or (), strict=True):
        for name, ours_of, theirs_of in zip(ours._fields, ours, theirs, strict=True):
            assert_close(ours_of, theirs_of, 1e-9, name)


@pytest.mark.matrix(3)
@pytest.mark.usefixtures("every_operator")
@each_sparsity
@pytest.mark.parametrize("options", [{}, {"positions": "rotary", "kv_heads": 1}, {"positions": "t5"}], ids=str)
@pytest.mark.parametrize("recipe", ["deepnorm", "sub_ln", "resi_dual"])
@torch.no_grad()
def test_decoding_step_by_step(recipe: str, options: dict[str, Any], moe: kl.MoE | None) -> None:
    model = build("encoder_decoder", recipe, moe=moe, **options).eval()
    form, text = fast_form(model), TARGET[2:]
    expected = model(SOURCE[2:], text).logits
    memory, cache = form.encode(SOURCE[2:]), form.new_cache(text.shape[1])
    steps = [
        form.decode(text[:, :2], memory, cache=cache),
        *(form.decode(text[:, [at]], memory, cache=cache) for at in (2, 3, 4)),
    ]
    assert_close(torch.cat([step.logits for step in steps], dim=1), expected, 1e-9, "logits")


@pytest.mark.usefixtures("every_operator")
@torch.no_grad()
def test_a_decoder_alone_goes_on_from_a_cache() -> None:
    model = build("decoder", "pre_ln").eval()
    form, text = fast_form(model), SOURCE[2:]
    cache = form.new_cache(text.shape[1])
    steps = [form(text[:, :3], cache=cache), form(text[:, 3:], cache=cache)]
    assert_close(torch.cat([step.logits for step in steps], dim=1), model(text).logits, 1e-9, "logits")


@pytest.mark.matrix(6)
@pytest.mark.usefixtures("every_operator")
@pytest.mark.parametrize("what", ["selective", "layer"])
@each_sparsity
@pytest.mark.parametrize("recipe", ["deepnorm", "pre_ln", "sub_ln", "dlcl", "resi_dual", "b2t", "x0_residual"])
def test_recomputation(recipe: str, moe: kl.MoE | None, what: Recompute) -> None:
    model = build("encoder_decoder", recipe, moe=moe)
    assert_equal(run(fast_form(model, what)), run(model))


def test_an_odd_recomputation_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match="unknown recompute 'True'"):
        kl.fast(build("decoder", "deepnorm"), recompute=True)  # pyright: ignore[reportArgumentType]


# How many times the plain model's errors the fast form may have. Where a ReLU turns on its other side of 0, gradients of one
# batch differ by up to 4 times in both directions, so that a ReLU takes more batches.
NOISE = 1.5
SMOOTH_BATCHES, RECTIFIED_BATCHES = 8, 32
HALF = {"dim": 64, "heads": 4, "ffn_dim": 128, "layers": 4}
SMALL_HALF = {"dim": 32, "heads": 2, "ffn_dim": 64, "layers": 2}  # half precision is slow on a CPU
QUICK = ("deepnorm", "dlcl", "pre_ln", "sub_ln")


def random_batch(shape: str, device: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    rows, lengths = (6, (20, 17)) if device == "cuda" else (3, (8, 7))
    generator = torch.Generator().manual_seed(seed)
    source, target = (torch.randint(1, 11, (rows, length), generator=generator) for length in lengths)
    source[1, 5:], target[2, 4:] = 0, 0
    return tuple(each.to(device) for each in ((source, target) if shape == "encoder_decoder" else (source,)))


def excess_error(model: Any, form: Any, shape: str, batches: int) -> torch.Tensor:
    """The distance of a fast form from fp64 over that of the plain model, of logits and of gradients: [2]."""
    exact, device = exact_form(model), next(model.parameters()).device.type
    found = []
    for seed in range(batches):
        batch = random_batch(shape, device, seed)
        expected = run(exact, batch)
        found.append([errors(run(each, batch), expected) for each in (model, form)])
    plain, ours = torch.tensor(found).square().mean(dim=0).sqrt()
    return ours / plain


def assert_as_precise(model: Any, form: Any, shape: str) -> None:
    excess = excess_error(model, form, shape, RECTIFIED_BATCHES)
    assert (excess <= NOISE).all(), excess.tolist()


def half_model(recipe: str, activation: str) -> Any:
    model = build("encoder_decoder", recipe, dtype=torch.float32, activation=activation, **SMALL_HALF)
    model.cast_weights(torch.bfloat16)
    return model


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(recipe, marks=() if recipe in QUICK else pytest.mark.slow) for recipe in kl.recipes.names()],
)
def test_half_precision_is_as_precise(recipe: str) -> None:
    model = half_model(recipe, "gelu")
    with kernels.assumed("cpu"):
        excess = excess_error(model, fast_form(model), "encoder_decoder", SMOOTH_BATCHES)
    assert (excess <= NOISE).all(), excess.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["deepnorm", "pre_ln", "sub_ln"])
def test_half_precision_with_a_relu_is_as_precise(recipe: str) -> None:
    model = half_model(recipe, "relu")
    with kernels.assumed("cpu"):
        assert_as_precise(model, fast_form(model), "encoder_decoder")


@pytest.mark.slow
@pytest.mark.matrix(2)
@pytest.mark.parametrize("recipe", ["deepnorm", "pre_ln"])
def test_a_residual_in_half_precision_would_be_found(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These two recipes tell it apart from noise: it costs a fifth more error in the logits, which NOISE lets pass."""

    def lossy(*arguments: Any) -> tuple[torch.Tensor, ...]:
        precise, rounded, statistics = residual_norm(*arguments)
        return precise.bfloat16().float(), rounded, statistics

    model = half_model(recipe, "gelu")
    with kernels.assumed("cpu"):
        precise = excess_error(model, fast_form(model), "encoder_decoder", SMOOTH_BATCHES)
        monkeypatch.setattr("kilolayer.speed.fast_layer.residual_norm", lossy)
        rounded = excess_error(model, fast_form(model), "encoder_decoder", SMOOTH_BATCHES)
    assert precise[0] < 1.1 < rounded[0]


def has_norms(model: torch.nn.Module) -> bool:
    return any(isinstance(module, LayerNorm) for module in model.modules())


GPU_FORMS: list[Any] = [
    ("none", False),
    ("selective", False),
    ("layer", False),
    pytest.param("none", True, marks=pytest.mark.slow),
    pytest.param("layer", True, marks=pytest.mark.slow),
]


@pytest.mark.gpu
@each_recipe
@each_shape
def test_every_recipe_and_shape_in_half_precision_on_a_gpu(shape: str, recipe: str) -> None:
    model = build(shape, recipe, device="cuda", dtype=torch.float32, **HALF)
    if not has_norms(model):
        pytest.skip("without norms the gradients in bf16 are wrong by a fifth and more in either form")
    model.cast_weights(torch.bfloat16)
    assert_as_precise(model, fast_form(model), shape)


@pytest.mark.gpu
@each_recipe
@each_shape
@each_sparsity
def test_every_recipe_and_shape_in_fp32_on_a_gpu(shape: str, recipe: str, moe: kl.MoE | None) -> None:
    model = build(shape, recipe, device="cuda", dtype=torch.float32, moe=moe, **HALF)
    batch = random_batch(shape, "cuda")
    found, expected = run(fast_form(model), batch), run(model, batch)
    if has_norms(model):
        assert_equal(found, expected, 1e-4)
    else:
        # Numbers grow from layer to layer: in either form single gradients are a tenth off those of fp64, all together 2%.
        assert max(errors(found, expected)) < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize(("what", "compiled"), GPU_FORMS)
@pytest.mark.parametrize("recipe", ["deepnorm", "sub_ln"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputed_and_compiled_on_a_gpu(recipe: str, dtype: torch.dtype, what: Recompute, compiled: bool) -> None:
    torch._dynamo.reset()
    model = build("encoder_decoder", recipe, device="cuda", dtype=torch.float32, **HALF)
    model.cast_weights(dtype)
    form = fast_form(model, what)
    if compiled:
        compile_layers(form)
    if dtype == torch.bfloat16:
        assert_as_precise(model, form, "encoder_decoder")
    else:
        batch = random_batch("encoder_decoder", "cuda")
        assert_equal(run(form, batch), run(model, batch), 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("left_out", ["residual_norm", "inner_norm", "short_attention", "relu_product", "relu_network"])
def test_a_kernel_that_is_left_out_changes_no_numbers_on_a_gpu(left_out: str) -> None:
    model = build("encoder_decoder", "sub_ln", device="cuda", dtype=torch.float32, **HALF)
    model.cast_weights(torch.bfloat16)
    with kernels.disabled(left_out):
        assert_as_precise(model, fast_form(model), "encoder_decoder")
