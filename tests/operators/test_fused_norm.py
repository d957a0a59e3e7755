"""Fused norms against plain ones in fp64: the formulas on the CPU, the kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kilolayer.layers.state import State
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from with_and_without import assert_same, loss_and_gradient

import kilolayer as kl
from kilolayer.layers.norm import LayerNorm, RMSNorm
from kilolayer.operators.fused_norm import (
    can_fuse_inner_norm,
    can_fuse_residual_norm,
    inner_norm,
    inner_norm_backward,
    residual_norm,
    residual_norm_backward,
)
from kilolayer.operators.random_bits import keep_mask
from kilolayer.speed.compiler import Recompute

pytestmark = pytest.mark.filterwarnings("default")  # the compiler warns about itself
SETTINGS = [  # device, dtype of the products, tolerance
    ("cpu", torch.float32, 1e-5),
    pytest.param("cuda", torch.bfloat16, 1e-2, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.float16, 2e-3, marks=pytest.mark.gpu),
]
SHAPES = [(1, 1, 64), (3, 5, 96), (2, 33, 512), (7, 11, 1000), (1, 9, 2048)]
MANY_ROWS = (1, 3001, 512)  # more than all programs take at once
EPS = 1e-3


def close(found: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    assert found is not None
    assert expected is not None
    assert found.shape == expected.shape
    error = float((found.detach().double() - expected.detach()).abs().max())
    assert error <= tolerance * max(1.0, float(expected.detach().abs().max()))


def norm(x: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    size = x.shape[-1:]
    return F.rms_norm(x, size, gain, EPS) if bias is None else F.layer_norm(x, size, gain, bias, EPS)


def leaves(*made: Tensor | None) -> tuple[list[Tensor | None], list[Any]]:
    """The same tensors with gradients: as they are, and in fp64."""
    given = [None if each is None else each.requires_grad_() for each in made]
    return given, [None if each is None else each.detach().double().requires_grad_() for each in given]


@pytest.mark.parametrize(("device", "dtype", "tolerance"), SETTINGS)
@pytest.mark.parametrize("shape", [*SHAPES, MANY_ROWS])
@pytest.mark.parametrize(
    ("centred", "shifted", "scaled", "readers"),
    [
        (True, True, False, "both"),
        (True, False, True, "precise"),
        (False, True, True, "rounded"),
        (False, False, False, "both"),
    ],
)
@pytest.mark.parametrize("keeps_sum", [False, True])
def test_residual_and_norm(
    keeps_sum: bool,
    shape: tuple[int, ...],
    centred: bool,
    shifted: bool,
    scaled: bool,
    readers: str,
    device: str,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    width, skip, branch = shape[-1:], 2.5, 0.7
    x = torch.randn(shape, device=device) + 0.5
    y = torch.randn(shape, device=device).to(dtype)
    shift = torch.randn(width, device=device).to(dtype) if shifted else None
    omega = torch.rand(width, device=device) + 0.5 if scaled else None
    gain = torch.rand(width, device=device) + 0.5
    bias = torch.randn(width, device=device) if centred else None
    given, exact = leaves(x, y, shift, omega, gain, bias)
    precise, rounded, _ = residual_norm(x, y, shift, omega, skip, branch, gain, bias, EPS, keeps_sum)
    x, y, shift, omega, gain, bias = exact
    added = skip * x * (1 if omega is None else omega) + branch * (y if shift is None else y + shift)
    normed = norm(added, gain, bias)
    first = added if keeps_sum else normed
    close(precise, first, 1e-5)
    close(rounded, normed, tolerance)
    assert rounded.dtype == dtype
    read = {"precise": [precise], "rounded": [rounded], "both": [precise, rounded]}[readers]
    expected = {"precise": [first], "rounded": [normed], "both": [first, normed]}[readers]
    gradients = [torch.randn_like(each) for each in read]
    torch.autograd.backward(read, gradients)
    torch.autograd.backward(expected, [each.double() for each in gradients])
    for ours, theirs in zip(given, exact, strict=True):
        if theirs is not None and theirs.grad is None:  # of a norm that nobody read
            assert ours is not None
            assert not ours.grad.any()
        elif ours is not None:
            # fp32 stays fp32: only what is written in the products' dtype may be rounded.
            close(ours.grad, theirs.grad, 1e-5 if ours.dtype == torch.float32 else tolerance)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), [("cpu", torch.float64, 1e-12), *SETTINGS])
@pytest.mark.parametrize("shape", [(1, 1, 64), (7, 11, 1000), (2, 1501, 512)])
@pytest.mark.parametrize(("p", "by_sample"), [(0.3, False), (0.3, True), (0.0, True)])
@pytest.mark.parametrize(("centred", "full"), [(True, True), (False, False)])
@pytest.mark.parametrize("keeps_sum", [False, True])
def test_a_branch_that_is_dropped(
    keeps_sum: bool,
    centred: bool,
    full: bool,
    p: float,
    by_sample: bool,
    shape: tuple[int, ...],
    device: str,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """Values and all gradients are those of the plain formula with the mask multiplied in."""
    width, skip, branch, precisely = shape[-1:], 2.5, 0.7, torch.promote_types(dtype, torch.float32)
    x = torch.randn(shape, device=device, dtype=precisely) + 0.5
    y = torch.randn(shape, device=device).to(dtype)
    shift = torch.randn(width, device=device).to(dtype) if full else None
    omega = torch.rand(width, device=device, dtype=precisely) + 0.5 if full else None
    gain = torch.rand(width, device=device, dtype=precisely) + 0.5
    bias = torch.randn(width, device=device, dtype=precisely) if centred else None
    seed = torch.tensor([1234567890123456789], device=device)
    samples = torch.tensor([0.0, 1.25] * 4, device=device)[1 : 1 + shape[0]] if by_sample else None
    given, exact = leaves(x, y, shift, omega, gain, bias)
    draw = (seed, p, samples)
    precise, rounded, _ = residual_norm(x, y, shift, omega, skip, branch, gain, bias, EPS, keeps_sum, *draw)
    x, y, shift, omega, gain, bias = exact
    factor = keep_mask(seed, shape, p).double() / (1 - p)
    if samples is not None:
        factor = factor * samples.double()[:, None, None]
    added = skip * x * (1 if omega is None else omega) + branch * factor * (y if shift is None else y + shift)
    normed = norm(added, gain, bias)
    first = added if keeps_sum else normed
    close(precise, first, min(tolerance, 1e-5))
    close(rounded, normed, tolerance)
    gradients = [torch.randn_like(each) for each in (precise, rounded)]
    torch.autograd.backward([precise, rounded], gradients)
    torch.autograd.backward([first, normed], [each.double() for each in gradients])
    for ours, theirs in zip(given, exact, strict=True):
        if ours is not None:
            close(ours.grad, theirs.grad, min(tolerance, 1e-5) if ours.dtype == precisely else tolerance)
    of_y = given[1].grad if given[1] is not None else None
    assert of_y is not None
    assert not of_y[factor == 0].any()


@pytest.mark.parametrize(("device", "dtype", "tolerance"), SETTINGS)
@pytest.mark.parametrize("shape", [*SHAPES, MANY_ROWS, (2, 3, 8192)])
@pytest.mark.parametrize("centred", [True, False])
def test_inner_norm(shape: tuple[int, ...], centred: bool, device: str, dtype: torch.dtype, tolerance: float) -> None:
    x = (torch.randn(shape, device=device) + 0.5).to(dtype)
    gain = torch.rand(shape[-1:], device=device) + 0.5
    bias = torch.randn(shape[-1:], device=device) if centred else None
    given, exact = leaves(x, gain, bias)
    found, expected = inner_norm(x, gain, bias, EPS)[0], norm(*exact)
    gradient = torch.randn_like(found)
    found.backward(gradient)
    expected.backward(gradient.double())
    assert found.dtype == dtype
    close(found, expected, tolerance)
    for ours, theirs in zip(given, exact, strict=True):
        if ours is not None:
            close(ours.grad, theirs.grad, 1e-5 if ours.dtype == torch.float32 else tolerance)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(1, 64), (15, 96), (77, 1000), (601, 512)])
@pytest.mark.parametrize(
    ("centred", "shifted", "learned"), [(True, True, False), (True, True, True), (False, False, True), (False, False, False)]
)
@pytest.mark.parametrize("keeps_sum", [False, True])
def test_totals_are_in_the_dtypes_of_their_parameters(
    shape: tuple[int, int], keeps_sum: bool, centred: bool, shifted: bool, learned: bool, device: str
) -> None:
    x, y, precise, rounded = (torch.randn(shape, device=device) for _ in range(4))
    shift, omega, gain, bias = (torch.rand(shape[1], device=device) + 0.5 for _ in range(4))
    y, rounded, shift = y.bfloat16(), rounded.bfloat16(), shift.bfloat16()
    some = (shift if shifted else None, omega if learned else None)
    first, _, statistics = residual_norm(x, y, *some, 2.0, 0.5, gain, bias if centred else None, EPS, keeps_sum)
    terms = (first, x if learned else None, None) if keeps_sum else (None, x, y)
    totals = residual_norm_backward(precise, rounded, *terms, *some, 2.0, 0.5, gain, statistics, y.dtype, learned)[2]
    exact = [each.double().requires_grad_() for each in (gain, bias, shift, omega)]
    of_gain, of_bias, of_shift, of_omega = exact
    wide = x.double().requires_grad_()
    before = 2.0 * (of_omega if learned else 1.0) * wide + 0.5 * (y.double() + (of_shift if shifted else 0.0))
    normed = norm(before, of_gain, of_bias if centred else None)
    torch.autograd.backward([before if keeps_sum else normed, normed], [precise.double(), rounded.double()])
    there = (True, centred, shifted, learned)
    expected = [
        (of, each.dtype) for of, each, is_there in zip(exact, (gain, bias, shift, omega), there, strict=True) if is_there
    ]
    for found, (of, dtype) in zip(totals, expected, strict=True):
        assert found.dtype == dtype
        close(found, of.grad, 1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(1, 64), (15, 96), (77, 1000), (601, 512)])
@pytest.mark.parametrize("centred", [True, False])
def test_behind_a_relu_the_gradient_of_its_bias_is_the_last_total(shape: tuple[int, int], centred: bool, device: str) -> None:
    before, gradient = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
    gain, bias = (torch.rand(shape[1], device=device) + 0.5 for _ in range(2))
    statistics = inner_norm(before.relu(), gain, bias if centred else None, EPS)[1]
    _, totals = inner_norm_backward(gradient, before.relu(), gain, statistics, True)
    exact = [each.double().requires_grad_() for each in (gain, *([bias] if centred else []), torch.zeros_like(gain))]
    *parameters, shift = exact
    norm((before.double() + shift).relu(), parameters[0], parameters[1] if centred else None).backward(gradient.double())
    assert [found.dtype for found in totals] == [torch.float32] * len(parameters) + [torch.bfloat16]
    for found, of in zip(totals, exact, strict=True):
        close(found, of.grad, 1e-2 if found.dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), SETTINGS)
@pytest.mark.parametrize("keeps_sum", [False, True])
def test_rows_that_do_not_lie_one_after_another(keeps_sum: bool, device: str, dtype: torch.dtype, tolerance: float) -> None:
    x, y, first, second = (torch.randn(4, 64, 6, device=device).mT for _ in range(4))
    gain, bias = torch.rand(64, device=device), torch.randn(64, device=device)
    given, exact = leaves(x, y.to(dtype))
    precise, rounded, _ = residual_norm(*given, None, None, 1.5, 1.0, gain, bias, EPS, keeps_sum)
    torch.autograd.backward([precise, rounded], [first, second.to(dtype)])
    added = 1.5 * exact[0] + exact[1]
    normed = norm(added, gain.double(), bias.double())
    expected = added if keeps_sum else normed
    torch.autograd.backward([expected, normed], [first.double(), second.to(dtype).double()])
    close(precise, expected, 1e-5)
    for ours, theirs in zip(given, exact, strict=True):
        close(ours.grad if ours is not None else None, theirs.grad, tolerance)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), SETTINGS)
@pytest.mark.parametrize("keeps_sum", [False, True])
def test_what_is_not_finite_is_seen(keeps_sum: bool, device: str, dtype: torch.dtype, tolerance: float) -> None:
    x, y, gain = torch.randn(6, 96, device=device), torch.randn(6, 96, device=device).to(dtype), torch.ones(96, device=device)
    x[2, 5], y[4, 95] = torch.nan, torch.inf
    (x, y, gain), _ = leaves(x, y, gain)
    assert x is not None
    assert gain is not None
    precise, rounded, _ = residual_norm(x, y, None, None, 1.0, 1.0, gain, torch.zeros_like(gain), EPS, keeps_sum)
    for found in (rounded,) if keeps_sum else (precise, rounded):
        assert found.isnan().all(dim=1).tolist() == [False, False, True, False, True, False]
    torch.autograd.backward([precise, rounded], [torch.ones_like(precise), torch.ones_like(rounded)])
    assert x.grad is not None
    assert gain.grad is not None
    assert x.grad.isnan().all(dim=1).tolist() == [False, False, True, False, True, False]
    assert gain.grad.isnan().all()


@pytest.mark.parametrize(("device", "dtype", "tolerance"), SETTINGS)
@pytest.mark.parametrize("full", [True, False])
def test_the_operators_are_what_they_say_to_the_compiler(full: bool, device: str, dtype: torch.dtype, tolerance: float) -> None:
    x, y, precise, rounded = (torch.randn(2, 7, 24, device=device) for _ in range(4))
    shift, omega, gain, bias = (torch.randn(24, device=device) for _ in range(4))
    y, rounded, shift = y.to(dtype), rounded.to(dtype), shift.to(dtype)
    absent = [each if full else None for each in (shift, omega, bias)]
    tolerances = {"rtol": 2 * tolerance, "atol": 2 * tolerance}
    given, _ = leaves(x, y, *absent[:2], gain, absent[2])
    draw = (torch.tensor(7, device=device), 0.3, torch.rand(2, device=device)) if full else ()
    for keeps_sum in (False, True):
        torch.library.opcheck(residual_norm, (*given[:4], 2.0, 1.0, *given[4:], EPS, keeps_sum, *draw), **tolerances)
    torch.library.opcheck(inner_norm, (given[1], *given[4:], EPS), **tolerances)
    x, y, shift, omega, gain, bias = (None if each is None else each.detach() for each in given)
    statistics = residual_norm(x, y, shift, omega, 2.0, 1.0, gain, bias, EPS, False)[2]
    gradients = (precise, rounded) if full else (None, rounded)
    for terms in ((None, x, y), (precise, x if full else None, None)):
        others = (shift, omega, 2.0, 1.0, gain, statistics, dtype, full, *draw)
        torch.library.opcheck(residual_norm_backward, (*gradients, *terms, *others), **tolerances)
    torch.library.opcheck(inner_norm_backward, (rounded, y, gain, statistics, full, 1.5 if full else 1.0), **tolerances)


class Calls(TorchDispatchMode):
    """Counts how often the operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.residual = self.sum = self.inner = self.widening = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.kilolayer.residual_norm.default:
            keeps_sum = args[9]
            self.residual += not keeps_sum
            self.sum += keeps_sum
        self.inner += func is torch.ops.kilolayer.inner_norm.default
        self.widening += func is torch.ops.kilolayer.normed_relu_product.default
        return func(*args, **(kwargs or {}))


def serve(patch: pytest.MonkeyPatch, answer: bool) -> None:
    for name in ("norm.can_fuse_inner_norm", "feedforward.can_fuse_relu_product"):
        patch.setattr(f"kilolayer.layers.{name}", lambda *_: answer)


def small_model(recipe: str | kl.recipes.Recipe, device: str = "cpu", half: bool = False, **options: Any) -> kl.EncoderDecoder:
    model = kl.EncoderDecoder(50, 32, 4, 64, 3, 3, recipe, device=device, **options).train()
    if half:
        model.lower(torch.bfloat16)
    return model


# How often each operator runs in a forward of 3 + 3 layers, which have 15 sublayers: residual norms, sums and the norms that
# follow them, norms alone, and those behind the first product of the feed-forward network. Here all norms are served: those
# of the two inputs and of the two outputs too.
MODELS = [
    ("deepnorm", {}, (15, 0, 0, 0)),
    ("post_ln", {"norm": "rms"}, (15, 0, 0, 0)),
    ("admin", {}, (15, 0, 0, 0)),
    ("pre_ln", {}, (0, 15, 4, 0)),
    ("pre_ln", {"norm": "rms", "final_norm": False}, (0, 15, 2, 0)),
    ("sub_ln", {}, (0, 15, 6 + 4, 6)),
    ("sub_ln", {"activation": "gelu", "norm": "rms"}, (0, 15, 6 + 6 + 4, 0)),
    ("sub_ln", {"activation_dropout": 1e-9}, (0, 15, 6 + 6 + 4, 0)),
    ("normformer", {}, (0, 15, 9 + 4, 6)),
    (kl.recipes.get("normformer", residual_scale=True), {}, (0, 15, 9 + 4, 6)),
    (kl.recipes.get("dlcl", norm="post"), {}, (15, 0, 6, 0)),
    # What the next layer reads is not what this one writes: each layer's input and output have norms of their own.
    ("dlcl", {}, (0, 9, 12 + 2, 0)),
    ("deepnorm", {"moe": kl.MoE(experts=4)}, (15, 0, 0, 0)),
    # A router's input, one in each stack, is not rounded.
    ("sub_ln", {"moe": kl.MoE(experts=4)}, (0, 13, 6 + 4 + 2, 4)),
]
WHAT: list[Recompute] = ["none", "selective", "layer"]


@pytest.mark.parametrize(("recipe", "options", "counts"), MODELS)
def test_a_model_is_the_same_with_them(
    recipe: str | kl.recipes.Recipe, options: dict[str, Any], counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Calls() as calls:
        assert_same(small_model(recipe, **options), partial(serve, monkeypatch), 1e-5)
    assert (calls.residual, calls.sum, calls.inner, calls.widening) == tuple(2 * count for count in counts)


@pytest.mark.parametrize("recipe", ["deepnorm", "pre_ln", "sub_ln", "normformer"])
def test_a_model_in_half_precision_is_the_same_with_them(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(small_model(recipe, half=True), partial(serve, monkeypatch), 1e-2)


@pytest.mark.parametrize("what", WHAT[1:])
@pytest.mark.parametrize("recipe", ["deepnorm", "pre_ln", "sub_ln"])
def test_a_model_is_the_same_when_it_is_recomputed(recipe: str, what: Recompute, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(recipe)
    for stack in model.stacks():
        stack.recompute = what
    assert_same(model, partial(serve, monkeypatch), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize(("recipe", "options"), [each[:2] for each in MODELS])
def test_a_model_in_half_precision_is_the_same_on_a_gpu(
    recipe: str | kl.recipes.Recipe,
    options: dict[str, Any],
    what: Recompute,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = small_model(recipe, "cuda", half=True, **options)
    for stack in model.stacks():
        stack.recompute = what
    found = {}
    for served in (False, True):
        if not served:
            serve(monkeypatch, False)
        source, target = torch.randint(1, 50, (2, 6, 33), generator=torch.Generator().manual_seed(0)).cuda()
        found[served] = loss_and_gradient(model, source, target)
        monkeypatch.undo()
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-2)
    # A token between two experts may go to the other one.
    assert float(F.cosine_similarity(found[True][1], found[False][1], dim=0)) > (0.99 if options.get("moe") else 0.999)


@pytest.mark.parametrize(
    ("recipe", "options", "graphs"),
    [
        ("admin", {}, 2),
        ("pre_ln", {}, 2),
        pytest.param("sub_ln", {"moe": kl.MoE(experts=4)}, 4, marks=pytest.mark.slow),
        pytest.param("deepnorm", {"moe": kl.MoE(experts=4)}, 4, marks=pytest.mark.slow),
        pytest.param("normformer", {}, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_one_graph_a_kind_has_them_for_all_layers_and_shapes(
    recipe: str, options: dict[str, Any], graphs: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert_same(small_model(recipe, device, half=True, **options), partial(serve, monkeypatch), 1e-2, compiled=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def states_before_the_second_layer(model: kl.EncoderDecoder) -> list[State]:
    seen: list[State] = []
    model.decoder.blocks[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    for what in WHAT:
        model.decoder.recompute = what
        model(torch.ones(2, 5, dtype=int), torch.ones(2, 5, dtype=int))
    return seen


def test_whole_layers_that_are_recomputed_keep_one_state(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, True)
    model = small_model("deepnorm", half=True)
    seen = states_before_the_second_layer(model)
    for state in seen[:2]:
        assert (state.precise.dtype, state.rounded.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(state.rounded, state.precise.bfloat16())
    assert seen[2].rounded is seen[2].precise


def test_a_layer_gets_its_first_norm_from_the_layer_below_unless_that_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, True)
    model = small_model("pre_ln", half=True)
    *kept, recomputed = states_before_the_second_layer(model)
    norm = model.decoder.blocks[1].get_submodule("self_attention.pre_norm")
    for state in kept:
        assert state.normed is not None
        assert (state.precise.dtype, state.normed.dtype) == (torch.float32, torch.bfloat16)
        close(state.normed, norm(state.precise).double(), 1e-2)
    assert recomputed.normed is None


@pytest.mark.parametrize("recipe", ["deepnorm", "pre_ln"])
@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"drop_path": 0.1}])
def test_a_branch_that_drops_stays_plain(recipe: str, options: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, True)
    model = small_model(recipe, **options)
    for training in (True, False):
        with Calls() as calls:
            model.train(training)(torch.ones(2, 5, dtype=int), torch.ones(2, 5, dtype=int))
        assert calls.residual + calls.sum == (0 if training else 15)


@pytest.mark.parametrize("served", [False, True])
def test_who_listens_to_a_norm_hears_it(served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, served)
    model, heard = small_model("pre_ln"), []
    for name in ("decoder.blocks.1.self_attention.pre_norm", "decoder.blocks.2.feedforward.pre_norm"):
        model.get_submodule(name).register_forward_hook(lambda _, inputs, output: heard.append((inputs[0], output)))
    with Calls() as calls:
        model(torch.ones(2, 5, dtype=int), torch.ones(2, 5, dtype=int))
    assert len(heard) == 2
    # Neither the sublayers before those norms nor those that begin with them.
    assert calls.sum == (15 - 4 if served else 0)


@pytest.mark.parametrize("start", ["released", "paper"])
def test_calibration_listens_to_the_parts_of_the_residual(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = kl.Encoder(50, 32, 4, 64, 3, kl.recipes.get("admin", start=start))
    expected = kl.calibrate(model, torch.arange(1, 49).view(4, 12)).encoder
    serve(monkeypatch, True)
    with Calls() as calls:
        assert kl.calibrate(model, torch.arange(1, 49).view(4, 12)).encoder == pytest.approx(expected)
    assert calls.residual == 0


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_a_norm_computes_in_its_own_dtype_and_returns_that_of_its_input(kind: type[LayerNorm] | type[RMSNorm]) -> None:
    norm, x = kind(24, eps=EPS), torch.randn(5, 24).bfloat16()
    assert torch.equal(norm(x), norm(x.float()).bfloat16())
    assert norm(x.float()).dtype == torch.float32


def test_a_compiled_layer_can_ask_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr("kilolayer.operators.kernels.why_no_kernels", lambda: "Triton is not installed")
    asked = (torch.device("cuda"), torch.float32, torch.bfloat16, 512)
    ask = torch.compile(lambda x: x if can_fuse_residual_norm(*asked) else -x, backend="eager", fullgraph=True)
    assert ask(torch.ones(1)) == -1


@pytest.mark.parametrize("can_fuse", [can_fuse_residual_norm, can_fuse_inner_norm])
def test_they_serve_half_precision_on_a_gpu(can_fuse: Callable[..., bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kilolayer.operators.kernels.why_no_kernels", lambda: None)
    gpu, cpu, single, half = torch.device("cuda"), torch.device("cpu"), torch.float32, torch.bfloat16
    assert can_fuse(gpu, single, half, 512)
    assert can_fuse(gpu, single, torch.float16, 8192)
    assert not can_fuse(cpu, single, half, 512)
    assert not can_fuse(gpu, single, single, 512)
    assert not can_fuse(gpu, half, half, 512)
    assert not can_fuse(gpu, single, half, 100)
    assert not can_fuse(gpu, single, half, 8200)
    monkeypatch.setattr("kilolayer.operators.kernels.why_no_kernels", lambda: "Triton is not installed")
    assert not can_fuse(gpu, single, half, 512)
