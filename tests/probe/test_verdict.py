"""The rules of a verdict, on measurements that are made up and on models that are known to be ill or well."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kilolayer as kl
from kilolayer.evaluate.stack_label import LEVELS, DeadStack
from kilolayer.probe.diagnosis import Measurements, Settings, measure
from kilolayer.probe.diagnosis_page import render_diagnosis, stacks_table
from kilolayer.probe.gradients import measure_gradients
from kilolayer.probe.record import DEAD_ENCODERS, FADED, RECORDS, UNREAD
from kilolayer.probe.verdict import judge

SLOW = Settings(lr=1e-4, warmup_steps=4000)


def measured(recipe: str, layers: int, settings: Settings = SLOW) -> Measurements:
    torch.manual_seed(0)
    model = kl.EncoderDecoder(64, 16, 2, 32, layers, layers, recipe)
    source, target, labels = torch.randint(1, 64, (3, 4, 10))
    return measure(model, lambda m: F.cross_entropy(m(source, target).logits.flatten(0, 1), labels.flatten()), settings)


@pytest.fixture(scope="module")
def well() -> Measurements:
    return measured("deepnorm", 4)


def kinds(found: Measurements) -> list[tuple[str, str]]:
    return [(finding.kind, finding.where) for finding in judge(found).findings]


@pytest.mark.parametrize(
    "recipe", ["rezero", *(pytest.param(name, marks=pytest.mark.slow) for name in kl.recipes.names() if name != "rezero")]
)
def test_a_shallow_model_that_starts_slowly_is_healthy(recipe: str) -> None:
    assert judge(measured(recipe, 2)).findings == ()


@pytest.mark.slow
def test_a_deep_post_ln_is_not_and_another_recipe_is_named() -> None:
    found = judge(measured("post_ln", 40))
    assert ("vanishing gradient", "decoder") in [(finding.kind, finding.where) for finding in found.findings]
    assert 'model={"recipe": "deepnorm"}' in found.options()
    assert found.verdict()[-1].startswith('Try: model={"recipe": "deepnorm"}')


@pytest.mark.slow
def test_a_deep_deepnorm_is_healthy() -> None:
    assert judge(measured("deepnorm", 40)).healthy


def test_a_healthy_one_is_said_to_be(well: Measurements) -> None:
    assert judge(well).healthy
    assert judge(well).verdict()[0].startswith("Healthy: the gradient of the encoder's first layers is ")
    assert judge(well).verdict()[0].endswith(RECORDS["start"]["none"].sentence("began without a finding"))
    trained = replace(well, settings=replace(SLOW, step=SLOW.steps))
    assert judge(trained).verdict()[0].endswith("of itself.")


def with_gradients(found: Measurements, **layers: tuple[float, ...]) -> Measurements:
    return replace(found, gradients=replace(found.gradients, layers=layers))


LOW = {"encoder": (1e-6, 5e-6, 1e-4, 6e-3), "decoder": (0.08, 0.07, 0.1, 0.12)}
ENCODER = DeadStack("encoder", reached=1e-6, moved=0.3)


def test_a_gradient_that_has_faded_before_the_end_of_a_run_is_a_forecast(well: Measurements) -> None:
    trained = replace(well, settings=replace(SLOW, step=700))
    (finding,) = judge(with_gradients(trained, **LOW)).findings
    assert (finding.kind, finding.where) == ("fading", "encoder")
    assert finding.text.startswith("The gradient of the encoder's first layers is 1/120,000 of the largest layer's")
    seen = FADED[0.1][LEVELS[-1].share].sentence("were below 1/10,000 after 10% of their steps")
    assert finding.text.endswith(f"of 1.2e-01). {seen}")
    assert kinds(with_gradients(trained, encoder=(0.06, 0.05, 0.04, 0.06), decoder=(0.1, 0.1, 0.1, 0.1))) == []
    ended = replace(trained, settings=replace(SLOW, step=SLOW.steps))
    assert kinds(with_gradients(ended, **LOW)) == []  # the label of the whole last tenth decides


def test_an_encoder_that_is_dead_at_the_end_of_its_run_is_named(well: Measurements) -> None:
    found = judge(with_gradients(replace(well, settings=replace(SLOW, step=SLOW.steps), dead=(ENCODER,)), **LOW))
    said = (
        "The encoder is dead: over the last tenth of the steps, the gradient of its first layers was 1/1,000,000 of the largest"
    )
    assert found.verdict()[0].startswith(said)
    assert found.verdict()[0].endswith(
        f"Of {DEAD_ENCODERS} translators with a dead encoder, {UNREAD} did not read their source."
    )
    assert found.options() == ['train={"lr": 2.5e-5}', 'train={"warmup_steps": 16000}', 'train={"eps": 1e-4}']


@pytest.mark.parametrize(
    ("gain", "said"), [(0.33, "largest layer's."), (0.012, "lowers the loss by only 0.012 nats per token.")]
)
def test_a_dead_encoder_whose_source_is_read_is_not_said_to_be_useless(well: Measurements, gain: float, said: str) -> None:
    ended = replace(well, settings=replace(SLOW, step=SLOW.steps), dead=(ENCODER,), source_gain=gain)
    assert judge(ended).verdict()[0].endswith(said)


def test_a_source_that_is_not_read_is_named_unless_its_encoder_is_dead_anyway(well: Measurements) -> None:
    trained = replace(well, settings=replace(SLOW, step=700), source_gain=0.012)
    (finding,) = judge(trained).findings
    assert (finding.kind, finding.where, finding.value) == ("source not read", "encoder", 0.012)
    assert "lowers the loss by only 0.012 nats per token" in finding.text
    assert judge(trained).options()[0] == 'train={"lr": 2.5e-5}'
    assert kinds(replace(trained, source_gain=0.6)) == []
    assert kinds(replace(trained, dead=(ENCODER,))) == [("dead", "encoder")]


def test_a_source_that_does_harm_is_not_said_to_lower_the_loss(well: Measurements) -> None:
    (finding,) = judge(replace(well, settings=replace(SLOW, step=700), source_gain=-0.001)).findings
    assert "the right source does not lower the loss, compared with the source of another sentence" in finding.text
    assert "-0.0" not in finding.text


def test_a_short_run_is_called_short_before_a_lower_rate_is_advised(well: Measurements) -> None:
    short = replace(well, settings=replace(SLOW, step=40, steps=40), source_gain=0.0, epochs=0.31)
    found = judge(short)
    assert found.verdict()[0] == "The run is short: it has read only 0.31 of its text. Train longer before you judge it."
    assert found.options()[:2] == ['train={"steps": 160}', 'train={"lr": 2.5e-5}']
    assert kinds(replace(short, epochs=1.2)) == [("source not read", "encoder")]
    assert kinds(replace(short, dead=(ENCODER,))) == [("dead", "encoder")]
    assert kinds(replace(short, source_gain=0.6)) == []


def test_a_stack_that_eps_keeps_still_has_its_reason(well: Measurements) -> None:
    hidden = DeadStack("decoder", reached=0.5, moved=1e-5)
    (finding,) = judge(replace(well, settings=replace(SLOW, step=SLOW.steps), dead=(hidden,))).findings
    assert finding.text == (
        "The decoder is dead: over the last tenth of the steps, a step moved its first layers by 1.0e-05 of the learning rate: "
        "train.eps hides their gradient."
    )


def test_a_stack_whose_gradient_eps_hides_is_not_advised_to_raise_it(well: Measurements) -> None:
    over_factor = {"encoder": (1e-12, 1e-13, 1e-12, 1e-12), "decoder": (1e-3, 1e-3, 1e-3, 1e-3)}
    gradients = replace(well.gradients, over_factor=over_factor)
    hidden = DeadStack("encoder", reached=0.5, moved=1e-5)
    found = judge(replace(well, settings=replace(SLOW, step=700), gradients=gradients, dead=(hidden,)))
    assert [finding.kind for finding in found.findings] == ["eps", "dead"]
    assert found.options() == ['train={"eps": 1e-14}', 'train={"lr": 2.5e-5}', 'train={"warmup_steps": 16000}']


@pytest.mark.parametrize(
    ("norms", "kind"),
    [
        ((0.02, 0.5, 0.9, 1.0), "vanishing gradient"),
        ((0.15, 0.5, 0.9, 1.0), "vanishing gradient"),
        ((1.0, 0.1, 0.05, 0.005), "exploding gradient"),
        ((0.3, 1.0, 1.0, 0.3), None),
    ],
)
def test_an_uneven_gradient_before_training(well: Measurements, norms: tuple[float, ...], kind: str | None) -> None:
    found = with_gradients(well, encoder=norms, decoder=(1.0, 1.0, 1.0, 1.0))
    assert kinds(found) == ([] if kind is None else [(kind, "encoder")])


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"loss": float("nan")}, ("not finite", "")),
        ({"residual": {"encoder": (1.0, 200.0), "decoder": (1.0, 2.0)}}, ("residual growth", "encoder")),
        ({"dead_units": {"decoder": (0.1, 0.8)}}, ("dead ReLUs", "decoder")),
        ({"entropy": {"decoder": {"self_attention": (0.01, 0.02, 0.5)}}}, ("narrow attention", "decoder")),
        ({"settings": Settings(lr=1e-4, warmup_steps=4000, eps=1e6)}, ("eps", "encoder")),
    ],
)
def test_each_rule_finds_its_own(well: Measurements, change: dict[str, Any], kind: tuple[str, str]) -> None:
    assert kinds(replace(well, **change))[:1] == [kind]


def test_the_eps_that_the_weights_have_decides_what_it_hides(well: Measurements) -> None:
    # A recipe multiplies eps by 1,000 in the encoder and by 1/1,000 in the decoder; both have a gradient of 1e-10 a parameter.
    both = {"encoder": (1e-9, 1e-10), "decoder": (1e-10, 1e-9)}
    over_factor = {"encoder": (1e-12, 1e-13), "decoder": (1e-7, 1e-6)}
    gradients = replace(well.gradients, per_parameter=both, over_factor=over_factor)
    (finding,) = judge(replace(well, gradients=gradients)).findings
    assert (finding.kind, finding.where) == ("eps", "encoder")
    assert "at its smallest it is 1.0e-10 per parameter, where eps is 1e-05." in finding.text
    assert finding.options == ('train={"eps": 1e-14}',)


def test_a_frozen_layer_has_no_gradient_that_could_have_vanished() -> None:
    torch.manual_seed(0)
    model = kl.Encoder(24, 8, 2, 16, 3)
    loss = lambda m: m(torch.arange(1, 13)[None]).logits.square().mean()  # noqa: E731
    whole = measure_gradients(model, loss)
    model.get_submodule("encoder.blocks.0").requires_grad_(False)
    measured = measure(model, loss, SLOW)
    found = measured.gradients
    for frozen, of in ((found.layers, whole.layers), (found.per_parameter, whole.per_parameter)):
        assert math.isnan(frozen["encoder"][0])
        assert frozen["encoder"][1:] == pytest.approx(of["encoder"][1:])
    assert all(math.isnan(norms[0]) for norms in found.kinds["encoder"].values())
    assert found.largest == max(found.layers["encoder"][1:])
    assert judge(measured).healthy
    assert "nan" not in judge(measured).verdict()[0]
    assert judge(replace(measured, settings=replace(SLOW, step=10))).healthy
    assert ("eps", "encoder") in kinds(replace(measured, settings=replace(SLOW, eps=1e6)))
    model.get_submodule("encoder.blocks").requires_grad_(False)
    assert judge(measure(model, loss, SLOW)).verdict()[0].startswith("Healthy: one step of Adam")


def test_a_loss_that_is_no_number_before_the_first_step_is_not_blamed_on_training(well: Measurements) -> None:
    assert judge(replace(well, loss=math.nan)).options() == []
    assert 'train={"lr": 2.5e-5}' in judge(replace(well, loss=math.nan, settings=replace(SLOW, step=5))).options()


def test_layers_without_gradient_are_not_healthy(well: Measurements) -> None:
    none = (0.0, 0.0, 0.0, 0.0)
    (finding,) = judge(with_gradients(well, encoder=none, decoder=none)).findings
    assert (finding.kind, finding.value) == ("no gradient", 0.0)
    # As in ReZero, whose decoder starts without reading the encoder.
    closed = judge(with_gradients(well, encoder=none, decoder=(1.0, 1.0, 1.0, 1.0)))
    assert closed.verdict()[0].startswith("Healthy: the gradient of the decoder's first layers is 100%")


def decoder(recipe: str, settings: Settings = SLOW) -> Measurements:
    model = kl.Decoder(64, 16, 2, 32, 2, recipe)
    tokens, labels = torch.randint(1, 64, (2, 4, 10))
    return measure(model, lambda m: F.cross_entropy(m(tokens).logits.flatten(0, 1), labels.flatten()), settings)


def test_an_output_table_that_starts_at_zero_by_its_recipe_is_no_fault() -> None:
    found = decoder("r_fixup")
    assert found.gradients.largest == 0 < found.gradients.total
    assert (
        judge(found)
        .verdict()[0]
        .startswith("Healthy: the output table is 0, so that the layers receive a gradient only from the second")
    )
    none = replace(found, gradients=replace(found.gradients, total=0.0))
    assert kinds(none) == [("no gradient", "")]


def test_layers_with_parts_of_a_users_own_do_not_count(well: Measurements) -> None:
    unknown = math.nan
    dead, narrow = {"decoder": (unknown, 0.8, 0.1)}, {"decoder": {"self_attention": (unknown, unknown, 0.5, 0.01, 0.02)}}
    idle, attention = reversed(judge(replace(well, dead_units=dead, entropy=narrow)).findings)
    assert idle.text.startswith("Most ReLUs are dead in 1 of 2 layers of the decoder: 80% in layer 2. ")
    assert "in 2 of 3 layers" in attention.text
    assert (idle.value, attention.value) == (0.8, 0.01)


def without_own_attention(found: Measurements) -> Measurements:
    return replace(
        found, entropy={"encoder": {}, "decoder": {"self_attention": (math.nan, 0.5, 0.5, 0.5), "other": (0.25,) * 4}}
    )


def test_a_stack_without_attention_of_ours_has_its_table(well: Measurements) -> None:
    rows = {row[0]: row[-2] for row in stacks_table(without_own_attention(well)).rows}
    assert rows["encoder 1"] == "-"
    assert rows["decoder 1"] == "0.25"


@pytest.mark.slow
def test_a_frozen_stack_without_attention_of_ours_has_a_page(well: Measurements) -> None:
    frozen = with_gradients(well, encoder=(math.nan,) * 4, decoder=(math.nan, 1.0, 1.0, 1.0))
    assert "<svg" in render_diagnosis("own", judge(without_own_attention(frozen)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_is_measured_in_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = kl.Encoder(24, 8, 2, 16, 1, dtype=dtype)
    loss = lambda m: m(torch.arange(1, 13)[None]).logits.square().mean()  # noqa: E731
    assert measure(model, loss, SLOW) == measure(copy.deepcopy(model).float(), loss, SLOW)
    assert {weight.dtype for weight in model.parameters()} == {dtype}


def test_states_that_have_collapsed(well: Measurements) -> None:
    rank = replace(
        well.rank, cosine={"encoder": (0.5, 0.999), "decoder": (0.5, 0.999)}, effective={"encoder": (9, 1.4), "decoder": (9, 8)}
    )
    assert kinds(replace(well, rank=rank)) == [("collapsed states", "encoder")]
