"""Admin's residual scales: what the profiling pass measures, what it leaves alone, and where the scales live."""

from __future__ import annotations

import logging
from math import log, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kilolayer as kl
from kilolayer.errors import InputError, OptionError
from kilolayer.models.calibrate import joined
from tests.recipes.naive_transformer import Admin, Branch
from tests.recipes.tiny_models import HEADS, PADDING, SHAPES, SOURCE, TARGET, build, randomise

BATCHES = {"encoder": SOURCE, "decoder": TARGET, "encoder_decoder": (SOURCE, TARGET)}


class ProfiledAdmin(Admin):
    """Sets each stack's w from variances, in the order of its sublayers, as one forward meets them."""

    def __init__(self, weights: dict[str, Tensor], layers: dict[str, int], start: str) -> None:
        super().__init__(weights, layers, HEADS)
        self.start = start
        self.real = {"encoder": SOURCE != PADDING, "decoder": TARGET != PADDING}
        self.scales: dict[str, list[float]] = {"encoder": [1.0], "decoder": [1.0]}
        self.branch_variances: dict[str, list[float]] = {"encoder": [], "decoder": []}

    def residual(self, name: str, x: Tensor, f: Branch) -> Tensor:
        side = name.split(".")[0]
        branch = f(x)
        self.branch_variances[side].append(self.variance(side, branch))
        if self.start == "released":
            w = self.scales[side][-1]
            self.scales[side].append(sqrt(self.variance(side, w * x) + self.variance(side, branch)))
        else:
            w = 1.0
            self.scales[side].append(sqrt(sum(self.branch_variances[side])))
        return self.norm(f"{name}.out_norm", w * x + branch)

    def variance(self, side: str, x: Tensor) -> float:
        elements = x[self.real[side]].flatten()
        return float(((elements - elements.mean()) ** 2).mean())

    def profile(self) -> dict[str, list[float]]:
        """The w of each residual; the number after the last has no residual."""
        memory = self.encode(self.embed(SOURCE), self.real["encoder"]) if self.layers["encoder"] else None
        if self.layers["decoder"]:
            self.decode(self.embed(TARGET), self.real["decoder"], memory, None if memory is None else self.real["encoder"])
        return {side: values[: len(self.branch_variances[side])] for side, values in self.scales.items()}


def scales_of(model: nn.Module, side: str) -> list[Tensor]:
    """The vectors w of one stack, in the order of its sublayers."""
    return [
        value for name, value in model.state_dict().items() if name.startswith(f"{side}.") and name.endswith(".skip.weight")
    ]


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


PROFILED: list[dict[str, str]] = [{"start": "released"}, {"start": "paper"}, {"start": "paper", "weight": "trainable"}]


@pytest.mark.matrix(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", PROFILED, ids=str)
def test_scales_are_those_of_a_naive_profile(shape: str, options: dict[str, str]) -> None:
    model, start = build(shape, "admin", options), options["start"]
    randomise(model.state_dict())  # w too: the pass has to start from 1
    before = snapshot(model)
    expected = ProfiledAdmin(before, SHAPES[shape], start).profile()
    calibration = kl.calibrate(model, BATCHES[shape])
    for side, scales in expected.items():
        assert getattr(calibration, side) == pytest.approx(scales, rel=1e-12)
        for vector, scale in zip(scales_of(model, side), scales, strict=True):
            torch.testing.assert_close(vector, torch.full_like(vector, scale), rtol=1e-12, atol=0)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items() if not name.endswith(".skip.weight"))


def test_batch_of_keywords_is_read_as_the_models_forward_reads_it() -> None:
    model = build("encoder", "admin")
    from_ids = kl.calibrate(model, SOURCE)
    embedded = model.embedding(SOURCE).detach()
    assert kl.calibrate(model, {"embeddings": embedded, "mask": SOURCE != PADDING}) == from_ids
    assert kl.calibrate(model, {"embeddings": embedded}) != from_ids


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start", ["released", "paper"])
def test_pass_leaves_random_state_and_training_flags(shape: str, start: str) -> None:
    model = build(shape, "admin", {"start": start}, dropout=0.3, attention_dropout=0.1).eval()
    next(module for name, module in model.named_modules() if name.endswith("blocks.1")).train()
    flags = {name: module.training for name, module in model.named_modules()}
    random_state = torch.get_rng_state()
    kl.calibrate(model, BATCHES[shape])
    assert torch.equal(torch.get_rng_state(), random_state)
    assert {name: module.training for name, module in model.named_modules()} == flags


def test_pass_runs_with_dropout() -> None:
    noisy = build("encoder", "admin", dropout=0.3).eval()
    quiet = build("encoder", "admin").eval()
    quiet.load_state_dict(noisy.state_dict())
    assert kl.calibrate(noisy, SOURCE) != kl.calibrate(quiet, SOURCE)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start", ["released", "paper"])
def test_calibrating_twice_gives_the_same_scales(shape: str, start: str) -> None:
    model = build(shape, "admin", {"start": start}, dropout=0.3)
    first = kl.calibrate(model, BATCHES[shape])
    once = snapshot(model)
    assert kl.calibrate(model, BATCHES[shape]) == first
    assert all(torch.equal(value, once[name]) for name, value in model.state_dict().items())
    assert any(scale != 1.0 for scale in first.encoder + first.decoder)


def test_later_forwards_leave_the_scales_alone() -> None:
    model = build("encoder", "admin")
    kl.calibrate(model, SOURCE)
    randomise(model.state_dict())
    trained = snapshot(model)
    model(SOURCE)
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())


UNCALIBRATED = [(name, {}) for name in kl.recipes.names() if name != "admin"] + [("admin", {"start": "closed"})]


@pytest.mark.matrix(4)
@pytest.mark.parametrize(("recipe", "options"), UNCALIBRATED, ids=[name for name, _ in UNCALIBRATED])
def test_recipe_without_profile_is_left_alone_and_says_so(
    recipe: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = build("encoder_decoder", recipe, options)
    randomise(model.state_dict())
    before = snapshot(model)
    with caplog.at_level(logging.INFO, logger="kilolayer"):
        calibration = kl.calibrate(model, (SOURCE, TARGET))
    assert (calibration.encoder, calibration.decoder) == ((), ())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [recipe in message and "nothing was changed" in message for message in caplog.messages] == [True]


# n, the residual sublayers of a stack: two a layer, three where a decoder reads an encoder.
CLOSED_FORM = [
    ("encoder", {"encoder_layers": 6}, {"encoder": (12, 2.017)}),
    ("decoder", {"decoder_layers": 6}, {"decoder": (12, 2.017)}),
    ("encoder_decoder", {"encoder_layers": 18, "decoder_layers": 4}, {"encoder": (36, 3.041), "decoder": (12, 2.017)}),
    ("encoder_decoder", {"encoder_layers": 6, "decoder_layers": 12}, {"encoder": (12, 2.017), "decoder": (36, 3.041)}),
    ("encoder", {"encoder_layers": 100}, {"encoder": (200, 6.075)}),
]


@pytest.mark.matrix(2)
@pytest.mark.parametrize(("shape", "depths", "expected"), CLOSED_FORM)
def test_closed_form(shape: str, depths: dict[str, int], expected: dict[str, tuple[int, float]]) -> None:
    model = build(shape, "admin", {"start": "closed"}, **depths)
    for side, (n, published) in expected.items():
        scale = sqrt((n + 1) / log(n + 1) - 1)
        assert scale == pytest.approx(published, abs=5e-4)
        vectors = scales_of(model, side)
        assert len(vectors) == n
        for vector in vectors:
            torch.testing.assert_close(vector, torch.full((8,), scale, dtype=torch.float64), rtol=1e-12, atol=0)


FIXED = [{}, {"start": "paper"}, {"weight": "fixed"}, {"start": "closed"}, {"start": "closed", "weight": "fixed"}]
TRAINED = [{"start": "released"}, {"weight": "trainable"}, {"start": "closed", "weight": "trainable"}]


@pytest.mark.parametrize(
    ("options", "trained"), [*((each, False) for each in FIXED), *((each, True) for each in TRAINED)], ids=str
)
def test_fixed_scales_are_saved_buffers_and_trained_ones_parameters(options: dict[str, str], trained: bool) -> None:
    model = build("encoder_decoder", "admin", options)
    scales = {name for name in model.state_dict() if name.endswith(".skip.weight")}
    assert len(scales) == 2 * 3 + 3 * 2
    own, other = dict(model.named_parameters()), dict(model.named_buffers())
    own, other = (own, other) if trained else (other, own)
    assert scales <= own.keys()
    assert scales.isdisjoint(other)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("weight", ["fixed", "trainable"])
def test_the_release_is_taken_whole(weight: str) -> None:
    with pytest.raises(OptionError, match=f'weight = "{weight}" has no effect on start = "released"'):
        kl.recipes.get("admin", start="released", weight=weight)


def test_the_default_is_the_papers() -> None:
    assert kl.recipes.get("admin") == kl.recipes.get("admin", start="paper", weight="derived")
    assert kl.recipes.get("admin").calibration() == "summed"


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_release_starts_attention_as_one_matrix_of_query_key_and_value(kv_heads: int) -> None:
    width, rows = 64, 64 + 2 * 16 * kv_heads
    joint, apart = (
        kl.EncoderDecoder(50, width, 4, 128, 1, 1, kl.recipes.get("admin", start=start), kv_heads=kv_heads).state_dict()
        for start in ("released", "paper")
    )
    for name in ("self_attention.f.query_key_value", "cross_attention.f.query", "cross_attention.f.key_value"):
        largest = joint[f"decoder.blocks.0.{name}.weight"].abs().max()
        assert float(largest) == pytest.approx(sqrt(6 / (rows + width)), rel=0.01)
    for name in ("self_attention.f.output", "feedforward.f.input", "feedforward.f.output"):
        bounds = [float(each[f"decoder.blocks.0.{name}.weight"].abs().max()) for each in (joint, apart)]
        assert bounds[0] == pytest.approx(bounds[1], rel=0.02)


def test_a_pass_that_fails_leaves_the_scales_as_they_were() -> None:
    model = build("encoder_decoder", "admin")
    kl.calibrate(model, (SOURCE, TARGET))
    before = snapshot(model)
    with pytest.raises(InputError, match="token ids"):
        kl.calibrate(model, (SOURCE, TARGET + 100))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_batch_of_padding_alone_is_refused() -> None:
    with pytest.raises(InputError, match="no finite variance"):
        kl.calibrate(build("encoder", "admin"), torch.zeros(2, 3).long())


def test_what_is_no_model_and_no_batch_is_refused() -> None:
    model = build("encoder", "admin")
    with pytest.raises(InputError, match="Sequential is not a Kilolayer model"):
        kl.calibrate(torch.nn.Sequential(model), SOURCE)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="the batch is None"):
        kl.calibrate(model, None)  # pyright: ignore[reportArgumentType]


def test_the_releases_scales_rise_from_one_and_the_papers_do_not() -> None:
    torch.manual_seed(0)
    model, other = (kl.Encoder(50, 64, 2, 128, 6, kl.recipes.get("admin", start=start)) for start in ("released", "paper"))
    other.load_state_dict(model.state_dict())
    tokens = torch.randint(1, 50, (8, 16))
    released, paper = kl.calibrate(model, tokens).encoder, kl.calibrate(other, tokens).encoder
    assert list(released) == sorted(released)
    assert released[0] == paper[0] == 1  # the formula's first is an empty sum
    assert paper[1] < 1


def test_batches_are_joined_row_by_row() -> None:
    short, long = torch.tensor([[5, 6]]), torch.tensor([[1, 2, 3], [4, 0, 0]])
    rows = torch.tensor([[5, 6, 0], [1, 2, 3], [4, 0, 0]])
    (whole,) = joined([(short,), (long,)])
    assert torch.equal(whole, rows)
    named = joined([{"tokens": short, "mask": short > 0}, {"tokens": long, "mask": long > 0}])
    assert torch.equal(named["mask"], rows > 0)
    model = build("encoder", "admin")
    assert kl.calibrate(model, joined([(SOURCE[:1],), (SOURCE[1:],)])) == kl.calibrate(model, SOURCE)
