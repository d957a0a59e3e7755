"""Compiled layers and recorded steps do what operations run one by one do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import kilolayer as kl
from kilolayer.data.batches import Batch
from kilolayer.optimizers.optimizer import make_optimizer
from kilolayer.parallel.peers import Peers
from kilolayer.parallel.processes import Processes
from kilolayer.runs.metrics import read_metrics
from kilolayer.speed.graph import GraphPool
from kilolayer.speed.graph_recorder import GraphRecorder
from kilolayer.speed.runtime import FAST
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training import loop
from kilolayer.training.guard import Guard
from kilolayer.training.norms import LayerNorms
from kilolayer.training.placement import Placement
from kilolayer.training.step import Stepper
from kilolayer.training.trainer import DTYPES
from tests.fixtures.small_runs import last_checkpoint, new_run, new_text_run, stop_after, task_of

# The compiler warns about itself.
pytestmark = pytest.mark.filterwarnings("default")

SHAPES = [(8, 6, 9), (4, 11, 11), (16, 5, 7), (8, 6, 6)]


def some_batch(seed: int) -> Batch:
    """A batch of one of a few shapes, with padding."""
    generator = torch.Generator().manual_seed(seed)
    rows, source_length, target_length = SHAPES[seed % len(SHAPES)]
    source = torch.randint(4, 40, (rows, source_length), generator=generator)
    labels = torch.randint(4, 40, (rows, target_length), generator=generator)
    source[0, -2:], labels[0, -3:] = 0, 0
    target = torch.cat([torch.full((rows, 1), 2), labels[:, :-1]], dim=1)
    target[labels == 0] = 0
    return Batch(source, target, labels, int((labels != 0).sum()))


def stepper_of(model_options: dict[str, Any] | None = None, **options: Any) -> Stepper:
    config = TrainConfig(**{"lr": 1e-3, "warmup_steps": 0, **options})
    shape = kl.ModelConfig(**{"layers": 3, "dim": 32, "heads": 2, "ffn_dim": 64, "vocab_size": 40, **(model_options or {})})
    device = torch.device("cuda")
    model = kl.build_model(shape, seed=1, device=device)
    assert isinstance(model, kl.EncoderDecoder)
    precise = model.cast_weights(DTYPES[config.precision]) if config.precision in DTYPES else None
    optimizer = make_optimizer(model.train(), config, precise, sums=config.accumulate > 1, runtime=FAST)
    return Stepper(model, optimizer, config, Guard(scaled=config.precision == "fp16"), device, refuse, runtime=FAST)


@pytest.fixture(scope="module")
def one_process() -> Iterator[Processes]:
    """A process that shares a model with itself over NCCL."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    processes = Processes(dist.group.WORLD)
    processes.group = Peers.of(dist.new_group(backend="nccl"))
    yield processes
    dist.destroy_process_group()


def stepper_of_shards(processes: Processes, model_options: dict[str, Any], **options: Any) -> Stepper:
    config = TrainConfig(**{"lr": 1e-3, "warmup_steps": 0, "shard": "full", **options})
    shape = kl.ModelConfig(**{"layers": 3, "dim": 32, "heads": 2, "ffn_dim": 64, "vocab_size": 40, **model_options})
    device, dtype = torch.device("cuda"), DTYPES.get(config.precision)
    kinds = {"shard": config.shard, "unit": config.shard_unit, "reshards": config.reshard_after_forward, "dtype": dtype}
    placement = Placement(shape, processes, device, 1, **kinds)
    assert isinstance(placement.model, kl.EncoderDecoder)
    precise = None if dtype is None else placement.model.cast_weights(dtype)
    optimizer = make_optimizer(placement.model.train(), config, precise, sums=config.accumulate > 1, runtime=FAST)
    guard = Guard(scaled=config.precision == "fp16")
    return Stepper(placement.model, optimizer, config, guard, device, refuse, processes=processes, runtime=FAST)


def refuse(text: str) -> None:
    """A step that falls back fails the test; that no kernel serves the residuals of a recipe does not."""
    if "add their residuals without a kernel" not in text:
        pytest.fail(text)


def losses(stepper: Stepper, steps: int) -> list[float]:
    count = stepper.config.accumulate
    found = []
    for step in range(steps):
        result = stepper.step([some_batch(step * count + part) for part in range(count)], 1e-3)
        assert result.fault is None
        found.append(result.loss)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"clip_norm": 0.1, "optimizer": "radam"}, {"optimizer": "adamw"}])
def test_recorded_training_follows_eager_training(options: dict[str, Any]) -> None:
    # Rounding flips a ReLU that stands at 0, and then losses differ by 1e-5 within 200 steps; a smooth function keeps to 1e-6.
    smooth = {"activation": "gelu"}
    recorded, eager = stepper_of(smooth, **options), stepper_of(smooth, **options, eager=True)
    ours, theirs = losses(recorded, 200), losses(eager, 200)
    assert max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)) < 1e-5
    assert len(recorded.recorder.recordings) == len(SHAPES) + (options.get("accumulate", 1) > 1)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", kl.recipes.names())
def test_every_recipe_is_compiled_once_and_recorded(recipe: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {"recipe": kl.recipes.get(recipe), "layers": 4, "drop_path": 0.1, "dropout": 0.1}
    stepper = stepper_of(options, precision="bf16")
    found = losses(stepper, 12)
    assert found[-1] < found[0]
    assert stepper.recorder.recordings
    # One form of a layer per side; three for Mix-LN: Post-LN, Pre-LN on a state that no kernel has normalized, and Pre-LN.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (6 if recipe == "mix_ln" else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_recorded_step_that_is_not_finite_changes_no_bit(precision: Any) -> None:
    stepper = stepper_of(precision=precision)
    losses(stepper, 8)
    before = {name: tensor.clone() for name, tensor in (stepper.optimizer.tensors() | stepper.model.state_dict()).items()}
    scale, stepper.guard.scale = stepper.guard.scale, math.inf
    assert stepper.step([some_batch(0)], 1e-3).fault == "the gradient"
    after = stepper.optimizer.tensors() | stepper.model.state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    stepper.guard.scale = scale
    assert stepper.step([some_batch(0)], 1e-3).fault is None


@pytest.mark.gpu
def test_dropout_is_drawn_anew_at_every_replay() -> None:
    stepper = stepper_of({"dropout": 0.5})
    found = [stepper.step([some_batch(0)], 0.0).loss for _ in range(6)]
    assert len(set(found)) == 6


@pytest.mark.gpu
def test_batches_that_lie_on_the_gpu_are_not_written_to() -> None:
    stepper = stepper_of()
    batches = [some_batch(seed) for seed in (0, 4)]  # of one shape
    there = [Batch(*(part.cuda() for part in batch.parts), batch.tokens) for batch in batches]
    for batch in (*there, *there):
        stepper.step([batch], 1e-3)
    for batch, kept in zip(batches, there, strict=True):
        assert all(torch.equal(a, b.cpu()) for a, b in zip(batch.parts, kept.parts, strict=True))


@pytest.mark.gpu
def test_a_step_is_recorded_while_something_of_the_one_before_is_alive() -> None:
    stepper, kept = stepper_of(), []
    stepper.model.register_forward_hook(lambda *call: kept.append(call[2].logits))
    found = [stepper.step([some_batch(0)], 1e-3).loss for _ in range(4)]
    assert len(kept) == 2  # one warm-up, one recording
    assert found[-1] < found[0]


@pytest.mark.gpu
def test_a_recording_owns_the_workspace_of_its_products() -> None:
    """`torch.compile` in its mode reduce-overhead frees the workspaces of cuBLAS, which a recording must go on without."""
    smooth = {"activation": "gelu", "dim": 128, "ffn_dim": 512}
    disturbed, undisturbed = stepper_of(smooth, precision="bf16"), stepper_of(smooth, precision="bf16")
    expected = losses(undisturbed, 16)
    found = losses(disturbed, 8)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    # What lies where the workspace was is not written to.
    others = [torch.zeros(2**20, device="cuda") for _ in range(64)]
    for step in range(8, 16):
        found.append(disturbed.step([some_batch(step)], 1e-3).loss)
    assert found == pytest.approx(expected, rel=1e-3)
    assert not any(each.any() for each in others)


@pytest.mark.gpu
def test_layers_are_measured_between_recorded_steps() -> None:
    smooth = {"activation": "gelu"}
    recorded, eager = stepper_of(smooth), stepper_of(smooth, eager=True)
    for _ in range(4):  # from the second on by replay
        ours, theirs = LayerNorms(), LayerNorms()
        for stepper, norms in ((recorded, ours), (eager, theirs)):
            losses(stepper, 6)
            stepper.step([some_batch(0)], 1e-3, norms)
        for kind in ("gradient", "update", "residual", "attention_logit", "cross_attention_logit"):
            for side, layers in getattr(theirs, kind).items():
                assert len(layers) == 3
                # The gradient of a key's bias is 0 but for rounding, which Adam makes as large as any other.
                assert getattr(ours, kind)[side] == pytest.approx(layers, rel=2e-2)
    assert len(recorded.recorder.recordings) == len(SHAPES) + 1


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_that_was_interrupted_goes_on(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    train = {"device": "cuda", "precision": precision, "steps": 12}
    whole, broken = (new_run(tmp_path / name, corpus, train=train) for name in ("whole", "broken"))
    assert loop.train(whole, task_of(whole)) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        assert loop.train(broken, task_of(broken)) == 143
    assert loop.train(broken, task_of(broken), resume=True) == 0
    a, b = last_checkpoint(whole), last_checkpoint(broken)
    assert a.state["batches"] == b.state["batches"]
    assert float(a.optimizer["updates"]) == float(b.optimizer["updates"]) == 12
    for name, tensor in a.model.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(b.model[name], tensor, rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_a_step_that_cannot_be_recorded_is_run_and_said_once() -> None:
    said: list[str] = []
    stepper = stepper_of({"dropout": 0.1})
    stepper.recorder.say = said.append
    stepper.model.register_forward_hook(lambda *call: call[2].logits.sum().item() and None)
    found = [stepper.step([some_batch(0)], 1e-3) for _ in range(6)]
    assert all(result.fault is None for result in found)
    assert found[-1].loss < found[0].loss
    assert len(said) == 1
    assert "recording failed" in said[0]
    assert float(stepper.optimizer.taken) == 6


@pytest.mark.gpu
def test_a_step_without_room_beside_the_recordings_takes_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = stepper_of()
    losses(stepper, 8)
    assert stepper.recorder.recordings
    accumulate, calls = stepper.accumulate, []

    def scarce(*parts: torch.Tensor) -> None:
        calls.append(len(stepper.recorder.recordings))
        if calls[-1]:
            raise torch.OutOfMemoryError("no room")
        accumulate(*parts)

    monkeypatch.setattr(stepper, "accumulate", scarce)
    assert stepper.step([some_batch(0)], 1e-3, LayerNorms()).fault is None
    assert calls == [4, 0]
    monkeypatch.undo()
    losses(stepper, 8)
    assert float(stepper.optimizer.taken) == 17
    assert stepper.recorder.recordings


@pytest.mark.gpu
def test_no_update_is_made_twice_for_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = stepper_of()
    losses(stepper, 8)

    def fail(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(stepper.meter, "record_update", fail)
    with pytest.raises(torch.OutOfMemoryError):
        stepper.step([some_batch(0)], 1e-3, LayerNorms())
    assert float(stepper.optimizer.taken) == 9


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [new_run, new_text_run])
def test_recorded_validations_find_what_plain_ones_find(kind: Any, tmp_path: Path, corpus: Path) -> None:
    run = kind(tmp_path / "run", corpus)
    task, device = task_of(run), torch.device("cuda")
    model = kl.build_model(run.config.model, seed=1, device=device)
    recorder = GraphRecorder(device, "validation runs", pytest.fail, GraphPool(device))
    weight = next(weight for weight in model.parameters() if weight.dim() == 2)
    counts = []
    for change in ("nothing", "values", "values", "memory", "nothing"):
        with torch.no_grad():
            if change == "values":
                weight *= 1.1
            elif change == "memory":
                weight.data = weight.data.clone() * 1.1
        found, expected = task.validate(model, 20, recorder), task.validate(model, 20)
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)
        counts.append(len(recorder.recordings))
    assert counts[1]
    # What lies elsewhere is warmed up and recorded anew.
    assert counts == [counts[0], counts[1], counts[1], counts[0], counts[1]]


@pytest.mark.gpu
def test_steps_and_validations_are_recorded_in_one_pool(tmp_path: Path, corpus: Path) -> None:
    model, train = {"dropout": 0.0}, {"device": "cuda", "precision": "fp32", "steps": 30, "valid_every": 5}
    recorded, eager = (
        new_run(tmp_path / str(eager), corpus, model=model, train={**train, "eager": eager}) for eager in (False, True)
    )
    losses = []
    for run in (recorded, eager):
        assert loop.train(run, task_of(run)) == 0
        losses.append([row["loss"] for row in read_metrics(run.folder) if row["kind"] == "valid"])
    assert len(losses[0]) == 6
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "train"),
    [
        ({}, {"precision": "fp32"}),
        ({"recipe": "sub_ln"}, {"precision": "bf16", "shard_unit": 2}),
        ({"dropout": 0.1}, {"precision": "bf16", "recompute": "layer"}),
        ({}, {"precision": "fp32", "accumulate": 2}),
        ({}, {"precision": "fp32", "reshard_after_forward": False}),
    ],
    ids=["fp32", "bf16", "recomputed", "accumulated", "kept"],
)
def test_recorded_steps_gather_shards(one_process: Processes, model: dict[str, Any], train: dict[str, Any]) -> None:
    own = {name: value for name, value in train.items() if name not in ("shard_unit", "reshard_after_forward")}
    steppers = stepper_of(model, **own), stepper_of_shards(one_process, model, **train)
    count, found = train.get("accumulate", 1), ([], [])
    for step in range(24):
        batches = [some_batch(step + index) for index in range(count)]
        for stepper, losses_of_steps in zip(steppers, found, strict=True):
            torch.manual_seed(step)
            losses_of_steps.append(stepper.step(batches, 1e-3, LayerNorms() if step % 5 == 0 else None).loss)
    assert found[1] == pytest.approx(found[0], rel=1e-4 if train["precision"] == "fp32" else 2e-2)
    recorder = steppers[1].recorder
    assert isinstance(recorder, GraphRecorder)
    assert recorder.recordings
    ours, theirs = (stepper.optimizer.precise() for stepper in steppers)
    assert ours.keys() == theirs.keys()
    if train["precision"] == "fp32":
        for name, weight in ours.items():
            torch.testing.assert_close(theirs[name], weight, rtol=1e-2, atol=2e-3, msg=lambda m, n=name: f"{n}: {m}")
