"""One step: accumulation, clipping, precision, and steps that are not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kilolayer as kl
from kilolayer.data.batches import Batch
from kilolayer.errors import InputError
from kilolayer.layers import attention
from kilolayer.models.trainable import Trainable
from kilolayer.models.trainable_config import TrainableConfig
from kilolayer.optimizers.optimizer import make_optimizer
from kilolayer.runs.metrics import read_metrics
from kilolayer.tasks.task import DeviceWork, Loss
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training import loop
from kilolayer.training.guard import TOLERATED, DivergedError, Guard
from kilolayer.training.norms import LayerNorms
from kilolayer.training.stack_health import StackWatch
from kilolayer.training.step import Stepper
from kilolayer.training.stop import Stopped
from kilolayer.training.trainer import DTYPES
from tests.fixtures.small_runs import bytes_of, last_checkpoint, new_run, record, task_of


def batch_of(rows: list[tuple[list[int], list[int]]]) -> Batch:
    """Sources and labels, padded on the right."""
    width, height = max(len(source) for source, _ in rows), max(len(labels) for _, labels in rows)
    source = torch.tensor([source + [0] * (width - len(source)) for source, _ in rows])
    labels = torch.tensor([labels + [0] * (height - len(labels)) for _, labels in rows])
    target = torch.tensor([[2, *labels[:-1]] + [0] * (height - len(labels)) for _, labels in rows])
    return Batch(source, target, labels, int((labels != 0).sum()))


def random_rows(count: int, seed: int) -> list[tuple[list[int], list[int]]]:
    generator = torch.Generator().manual_seed(seed)

    def sentence() -> list[int]:
        length = int(torch.randint(1, 9, (), generator=generator))
        return [*torch.randint(4, 30, (length,), generator=generator).tolist(), 3]

    return [(sentence(), sentence()) for _ in range(count)]


def stepper_of(dtype: torch.dtype = torch.float64, model: dict[str, Any] | None = None, **options: Any) -> Stepper:
    config = TrainConfig(**{"lr": 1e-2, "warmup_steps": 0, **options})
    shape = kl.ModelConfig(layers=2, dim=16, heads=2, ffn_dim=32, vocab_size=30, **(model or {}))
    built = kl.build_model(shape, seed=1, dtype=dtype)
    assert isinstance(built, kl.EncoderDecoder)
    guard = Guard(scaled=config.precision == "fp16")
    precise = built.cast_weights(DTYPES[config.precision]) if config.precision in DTYPES else None
    optimizer = make_optimizer(built.train(), config, precise, sums=True)
    return Stepper(built, optimizer, config, guard, torch.device("cpu"))


@pytest.mark.parametrize("recorded", [False, True])
def test_work_on_the_device_comes_before_the_step(recorded: bool) -> None:
    """A stepper that reverses sources itself is one that is given reversed sources."""

    def reverse(parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        assert not torch.is_grad_enabled()
        return parts[0].flip(1), *parts[1:]

    batches = [batch_of(random_rows(4, seed)) for seed in range(2)]
    plain, working = stepper_of(), stepper_of()
    working.device_work = DeviceWork(reverse, recorded)
    for _ in range(3):
        theirs = working.step(batches, 1e-2)
        assert plain.step([replace(batch, source=batch.source.flip(1)) for batch in batches], 1e-2) == theirs
    assert state_of(plain) == state_of(working)
    assert stepper_of().step(batches, 1e-2) != theirs


def held_gradients(stepper: Stepper) -> dict[str, torch.Tensor]:
    """What the next update would read."""
    named = [pair for group in stepper.optimizer.groups for pair in zip(group.names, group.gradients, strict=True)]
    return {name: gradient for name, gradient in named if gradient is not None}


def gradients_of(stepper: Stepper, batches: list[Batch]) -> dict[str, torch.Tensor]:
    """The gradients that the optimizer is given."""
    found: dict[str, torch.Tensor] = {}
    update = stepper.optimizer.update

    def note(scale: torch.Tensor, finite: torch.Tensor, measures: bool) -> list[torch.Tensor] | None:
        found.update({name: gradient * scale for name, gradient in held_gradients(stepper).items()})
        return update(scale, finite, measures)

    stepper.optimizer.update = note
    stepper.step(batches, 1e-2)
    return found


def state_of(stepper: Stepper) -> dict[str, bytes]:
    tensors = stepper.model.state_dict() | stepper.optimizer.tensors()
    tensors |= {f"{name}/precise": tensor for name, tensor in stepper.optimizer.precise().items()}
    return {name: bytes_of(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("cuts", [[1, 8], [3, 4, 9], [2, 3, 5, 6, 9]])
def test_accumulated_batches_are_one_batch_of_their_union(cuts: list[int]) -> None:
    rows = random_rows(9, seed=4)
    parts = [batch_of(rows[a:b]) for a, b in zip([0, *cuts], [*cuts, 9], strict=True) if a < b]
    assert len({part.tokens for part in parts}) > 1
    together, apart = gradients_of(stepper_of(), [batch_of(rows)]), gradients_of(stepper_of(accumulate=len(parts)), parts)
    assert together.keys() == apart.keys()
    for name, gradient in together.items():
        torch.testing.assert_close(apart[name], gradient, rtol=1e-6, atol=1e-6 * float(gradient.abs().max()))
    whole, pieces = stepper_of().step([batch_of(rows)], 1e-2), stepper_of(accumulate=len(parts)).step(parts, 1e-2)
    assert pieces.tokens == whole.tokens == sum(len(labels) for _, labels in rows)
    assert (pieces.loss, pieces.nll) == pytest.approx((whole.loss, whole.nll), rel=1e-6)
    assert pieces.gradient_norm == pytest.approx(whole.gradient_norm, rel=1e-6)


def test_a_step_without_anything_to_predict_says_so() -> None:
    batch = batch_of(random_rows(4, seed=4))
    with pytest.raises(InputError, match="nothing in this step can be predicted"):
        stepper_of().step([replace(batch, tokens=0)], 1e-2)


def make_sparse(stepper: Stepper) -> Stepper:
    """As if the model had routers: their loss is a mean over the batch's real target positions."""

    def add_router_loss(model: Any, inputs: Any, out: Any) -> Any:
        return replace(out, router_loss=0.5 * out.states[inputs[1] != 0].square().mean())

    stepper.model.register_forward_hook(add_router_loss)
    return stepper


def test_the_router_loss_counts_by_the_tokens_of_its_batch() -> None:
    rows = random_rows(9, seed=4)
    parts = [batch_of(rows[:2]), batch_of(rows[2:3]), batch_of(rows[3:])]
    dense = stepper_of(label_smoothing=0.0).step([batch_of(rows)], 1e-2)
    source, target, _ = batch_of(rows).parts
    with torch.no_grad():
        router_loss = make_sparse(stepper_of()).model(source, target).router_loss
    whole, pieces = (make_sparse(stepper_of(label_smoothing=0.0)).step(each, 1e-2) for each in ([batch_of(rows)], parts))
    assert dense.loss == dense.nll == pytest.approx(whole.nll, rel=1e-6)
    assert whole.loss == pytest.approx(dense.loss + float(router_loss), rel=1e-6)
    assert (pieces.loss, pieces.nll) == pytest.approx((whole.loss, whole.nll), rel=1e-6)
    assert pieces.gradient_norm == pytest.approx(whole.gradient_norm, rel=1e-6) != pytest.approx(dense.gradient_norm, rel=1e-3)


def test_layers_are_measured_once_however_many_batches_a_step_has() -> None:
    rows = random_rows(6, seed=4)
    one, three = LayerNorms(), LayerNorms()
    stepper_of().step([batch_of(rows)], 1e-2, one)
    stepper_of(accumulate=3).step([batch_of(rows)] * 3, 1e-2, three)
    for norms in (one, three):
        for by_side in (norms.gradient, norms.update, norms.residual):
            assert {side: len(layers) for side, layers in by_side.items()} == {"encoder": 2, "decoder": 2}
    for side in ("encoder", "decoder"):
        assert three.residual[side] == pytest.approx(one.residual[side])
        assert three.gradient[side] == pytest.approx(one.gradient[side])


def test_the_largest_logit_of_a_step_is_that_of_its_batches() -> None:
    batches = [batch_of(random_rows(6, seed=seed)) for seed in (4, 5)]
    both, apart = LayerNorms(), [LayerNorms(), LayerNorms()]
    stepper_of(accumulate=2).step(batches, 1e-2, both)
    for batch, norms in zip(batches, apart, strict=True):
        stepper_of().step([batch], 1e-2, norms)
    for name in ("attention_logit", "cross_attention_logit"):
        first, second = (getattr(norms, name) for norms in apart)
        assert first != second
        assert getattr(both, name) == {side: list(map(max, first[side], second[side])) for side in first}
    assert {side: len(layers) for side, layers in both.attention_logit.items()} == {"encoder": 2, "decoder": 2}
    assert {side: len(layers) for side, layers in both.cross_attention_logit.items()} == {"decoder": 2}


def test_logits_are_computed_only_in_steps_that_measure_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    record_logit = attention.record_largest_logit
    monkeypatch.setattr(attention, "record_largest_logit", lambda *inputs: (calls.append(1), record_logit(*inputs)))
    batches = [batch_of(random_rows(6, seed=seed)) for seed in range(20)]
    states = []
    for every in (20, 3):
        torch.manual_seed(0)
        stepper = stepper_of(torch.float32, model={"dropout": 0.1, "attention_dropout": 0.1})
        for step, batch in enumerate(batches):
            calls.clear()
            measures = step % every == every - 1
            stepper.step([batch], 1e-2, LayerNorms() if measures else None)
            assert len(calls) == (6 if measures else 0)  # 2 in the encoder, 4 in the decoder
        states.append(state_of(stepper))
    assert states[0] == states[1]


@pytest.mark.parametrize(
    "options", [{}, {"optimizer": "adamw", "weight_decay": 0.5}, {"optimizer": "radam", "weight_decay": 0.5}]
)
def test_layer_norms_are_what_they_say(options: dict[str, Any]) -> None:
    stepper, norms = stepper_of(**options), LayerNorms()
    before = {name: tensor.clone() for name, tensor in stepper.model.state_dict().items()}
    result = stepper.step([batch_of(random_rows(6, seed=4))], 1e-2, norms)
    after = stepper.model.state_dict()
    for side in ("encoder", "decoder"):
        for layer in range(2):
            changed = [after[name] - before[name] for name in after if name.startswith(f"{side}.blocks.{layer}.")]
            assert changed
            norm = torch.cat([each.flatten() for each in changed]).norm()
            assert norms.update[side][layer] == pytest.approx(float(norm), rel=1e-5)
    assert sum(value**2 for layers in norms.gradient.values() for value in layers) < result.gradient_norm**2
    for name, stacks in norms.rounded().items():
        for side, layers in stacks.items():
            assert layers == pytest.approx(getattr(norms, name)[side], rel=1e-5)
            assert all(len(f"{value:e}".partition("e")[0].rstrip("0")) <= 7 for value in layers)  # six digits and the point


@pytest.mark.parametrize("largest", [0.0, 0.01, 1e6])
def test_clipping_scales_the_whole_gradient_down_to_the_largest_norm(largest: float) -> None:
    batch = batch_of(random_rows(4, seed=1))
    before, clipped = gradients_of(stepper_of(), [batch]), gradients_of(stepper_of(clip_norm=largest), [batch])
    norm = math.sqrt(sum(float(each.square().sum()) for each in before.values()))
    scale = min(1.0, largest / norm) if largest else 1.0
    for name, was in before.items():
        torch.testing.assert_close(clipped[name], was * scale, rtol=1e-4, atol=1e-7)


def test_a_step_says_that_it_was_clipped() -> None:
    batch = batch_of(random_rows(4, seed=1))
    assert stepper_of(clip_norm=1e-3).step([batch], 1e-2).clipped
    assert not stepper_of(clip_norm=1e3).step([batch], 1e-2).clipped
    assert not stepper_of(clip_norm=0.0).step([batch], 1e-2).clipped


def poison_gradient(stepper: Stepper, value: float) -> None:
    parameter = next(p for p in stepper.model.parameters() if p.dim() == 1)
    parameter.register_hook(lambda gradient: torch.full_like(gradient, value))


def poison_loss(stepper: Stepper, value: float) -> None:
    stepper.model.register_forward_hook(lambda *call: replace(call[2], logits=call[2].logits * value))


@pytest.mark.matrix(3)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("poison", "what"), [(poison_gradient, "the gradient"), (poison_loss, "the loss")])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_step_that_is_not_finite_changes_no_bit(poison: Any, what: str, value: float, clip: float) -> None:
    stepper, batch = stepper_of(torch.float32, clip_norm=clip, accumulate=2), batch_of(random_rows(4, seed=1))
    assert stepper.step([batch, batch], 1e-2).fault is None
    before = state_of(stepper)
    poison(stepper, value)
    assert stepper.step([batch, batch], 1e-2, LayerNorms()).fault == what
    assert state_of(stepper) == before
    assert not any(gradient.any() for gradient in held_gradients(stepper).values())


class Normed(Trainable):
    """A model of a task's own, with running means that its forward pass moves in place or replaces."""

    config = TrainableConfig

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.output = nn.BatchNorm1d(3), nn.Linear(3, 1)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.largest = torch.maximum(self.largest, x.detach().abs().max())
        return self.output(self.norm(x))


def normed_stepper() -> Stepper:
    def loss(model: nn.Module, parts: tuple[torch.Tensor, ...], *, hidden_states: bool) -> Loss:
        scores = model(*parts)
        total = scores.square().sum()
        return Loss(total, total, torch.tensor(len(scores)), scores)

    torch.manual_seed(1)
    model, config = Normed(), TrainConfig(lr=1e-2, warmup_steps=0)
    optimizer = make_optimizer(model.train(), config, sums=True)
    return Stepper(model, optimizer, config, Guard(scaled=False), torch.device("cpu"), loss=loss)


@dataclass(frozen=True)
class Points:
    parts: tuple[torch.Tensor, ...]
    tokens: int = 4


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_that_is_not_finite_leaves_the_buffers_of_a_tasks_own_model(count: int) -> None:
    stepper, good = normed_stepper(), Points((torch.arange(12.0).reshape(4, 3).cos(),))
    assert stepper.step([good] * count, 1e-2).fault is None
    before = state_of(stepper)
    assert stepper.step([good] * (count - 1) + [Points((good.parts[0] / 0,))], 1e-2).fault == "the loss"
    assert state_of(stepper) == before
    assert stepper.step([good] * count, 1e-2).fault is None
    assert state_of(stepper) != before


def test_a_step_that_is_started_again_begins_with_the_buffers_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    once, again = normed_stepper(), normed_stepper()
    batches = [Points((torch.arange(12.0).reshape(4, 3).cos() * scale,)) for scale in (1, 2)]
    once.step(batches, 1e-2)
    with monkeypatch.context() as patch:
        patch.setattr(again, "sum_over_processes", lambda: (_ for _ in ()).throw(Stopped(15)))
        with pytest.raises(Stopped):
            again.step(batches, 1e-2)
    assert again.restart()
    again.step(batches, 1e-2)
    assert state_of(again) == state_of(once)


def test_half_precision_steps_like_single_precision() -> None:
    batch = batch_of(random_rows(8, seed=1))
    exact = stepper_of(torch.float32).step([batch], 1e-2)
    for precision in ("bf16", "fp16"):
        stepper = stepper_of(torch.float32, precision=precision)
        result = stepper.step([batch], 1e-2)
        assert result.fault is None
        assert result.loss == pytest.approx(exact.loss, rel=2e-2)
        assert result.loss != exact.loss
        # The loss scale, 32768 in fp16, must be gone from the gradient.
        assert result.gradient_norm == pytest.approx(exact.gradient_norm, rel=5e-2)
        assert all(tensor.dtype == torch.float32 for tensor in stepper.optimizer.precise().values())


def test_the_loss_scale_halves_at_a_skip_and_doubles_after_good_steps() -> None:
    guard = Guard(scaled=True)
    assert guard.scale == 2**15
    guard.skip(1, "the gradient")
    guard.skip(2, "the gradient")
    assert guard.scale == 2**13
    for _ in range(Guard.GROWTH_STEPS - 1):
        guard.accept()
    assert guard.scale == 2**13
    guard.accept()
    assert guard.scale == 2**14
    plain = Guard(scaled=False)
    plain.skip(1, "the loss")
    for _ in range(Guard.GROWTH_STEPS):
        plain.accept()
    assert plain.scale == 1.0


def test_the_loss_scale_has_bounds() -> None:
    guard = Guard(scaled=True)
    for step in range(40):
        guard.skip(step, "the loss")
    assert guard.scale == 1.0
    for _ in range(40 * Guard.GROWTH_STEPS):
        guard.accept()
    assert guard.scale == 2**24


def test_the_guards_state_goes_round() -> None:
    guard, other = Guard(scaled=True), Guard(scaled=True)
    guard.accept()
    guard.skip(2, "the loss")
    guard.accept()
    guard.skip(4, "the loss")
    other.load_state(guard.state())
    assert vars(other) == vars(guard)
    assert (other.scale, other.skipped, other.in_a_row, other.good) == (2**13, 2, 1, 0)


def test_a_finite_step_forgives_the_ones_before() -> None:
    guard = Guard(scaled=False)
    for step in range(1, 100):
        if step % TOLERATED == 0:
            guard.accept()
        else:
            guard.skip(step, "the loss")
            guard.check(step)
    assert guard.skipped == 90


class PoisonedBatches:
    """Makes the loss of some steps infinite, by the model's output."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
        real = Stepper.step
        taken = 0

        def step(stepper: Stepper, *arguments: Any) -> Any:
            nonlocal taken
            taken += 1
            if taken not in steps:
                return real(stepper, *arguments)
            before = state_of(stepper)
            handle = stepper.model.register_forward_hook(lambda *call: replace(call[2], logits=call[2].logits * math.nan))
            result = real(stepper, *arguments)
            handle.remove()
            assert state_of(stepper) == before
            return result

        monkeypatch.setattr(Stepper, "step", step)


def test_training_goes_on_after_a_skipped_step_and_says_which(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path / "run", corpus, train={"log_every": 3, "layers_every": 1})
    PoisonedBatches(monkeypatch, {2, 4, 5, 6})
    watched: list[int] = []
    monkeypatch.setattr(StackWatch, "check", lambda _watch, step: watched.append(step) or {})
    assert loop.train(run, task_of(run)) == 0
    assert watched == [1, 3]  # the layers of a skipped step have no finite gradient
    rows = read_metrics(run.folder)
    events = [row for row in rows if row["kind"] == "event"]
    assert [row["step"] for row in events] == [2, 4, 5, 6]
    assert events[0]["text"] == "step 2 skipped: the loss is not finite"
    assert "step 5 skipped" in (run.folder / "log.txt").read_text()
    lines = {row["step"]: row for row in rows if row["kind"] == "train"}
    assert lines[3]["skipped"] == 1
    assert math.isfinite(lines[3]["loss"])  # a NaN never enters a running mean
    assert (lines[6]["skipped"], lines[6]["loss"]) == (3, None)
    assert [row["step"] for row in rows if row["kind"] == "layers"] == [1, 3]
    last = last_checkpoint(run)
    assert last.state["guard"]["skipped"] == 4
    assert all(bool(torch.isfinite(tensor).all()) for tensor in last.model.values())
    assert float(last.optimizer["updates"]) == 2


def test_ten_bad_steps_in_a_row_end_the_run_with_advice(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(tmp_path / "run", corpus, train={"steps": 30, "save_every": 2})
    PoisonedBatches(monkeypatch, set(range(5, 31)))
    with pytest.raises(DivergedError) as caught:
        loop.train(run, task_of(run))
    assert caught.value.where == "step 14"
    assert "10 steps in a row" in caught.value.what
    assert "train.lr" in caught.value.fix
    assert "train.clip_norm" in caught.value.fix
    events = [row["step"] for row in read_metrics(run.folder) if row["kind"] == "event"]
    assert events == list(range(5, 15))
    assert record(run)["step"] == 12  # the run can be resumed once its cause is gone


@pytest.mark.slow
def test_no_step_of_a_clean_run_is_skipped(tmp_path: Path, corpus: Path) -> None:
    run = new_run(tmp_path / "run", corpus, train={"steps": 2000, "log_every": 100})
    assert loop.train(run, task_of(run)) == 0
    assert sum(row["skipped"] for row in read_metrics(run.folder) if row["kind"] == "train") == 0
