"""A run that was interrupted is, to the bit, the run that was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kilolayer import recipes
from kilolayer.errors import InputError
from kilolayer.runs import checkpoint
from kilolayer.runs.metrics import read_metrics
from kilolayer.runs.run import Run
from kilolayer.tasks.translation.task import TranslationTask, TranslationValidation
from kilolayer.training import loop, placement
from kilolayer.training.loop import train
from kilolayer.training.step import Stepper
from kilolayer.training.stop import Stop
from kilolayer.training.trainer import Best, Trainer
from tests.fixtures.small_runs import bytes_of, new_run, record, stop_after, stopped_and_resumed, task_of

CALIBRATED = [name for name in recipes.names() if recipes.get(name).calibration() is not None]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout everywhere": {
        "model": {"dropout": 0.2, "attention_dropout": 0.1, "activation_dropout": 0.1, "drop_path": 0.1},
    },
    "accumulation": {"train": {"accumulate": 3}},
    "norms of layers": {"train": {"layers_every": 1}},
    "calibrated": {"model": {"recipe": CALIBRATED[0]}, "train": {"layers_every": 2}},
    "radam, clipped, decayed": {"train": {"optimizer": "radam", "clip_norm": 0.5, "weight_decay": 0.1, "schedule": "cosine"}},
    "rates of the recipe": {
        "model": {"recipe": "complete_p"},
        "train": {"optimizer": "adamw", "weight_decay": 0.1, "layers_every": 2},
    },
    "bf16": {"train": {"precision": "bf16"}},
    "fp16": {"train": {"precision": "fp16"}},
    "a log line across the break": {"train": {"log_every": 4}},
    "validation before the break": {"train": {"valid_every": 2, "valid_bleu": True}},
    "experts": {
        "model": {"moe": {"experts": 4, "every": 1, "second": "random", "loss_free": 1e-2}},
        "train": {"log_every": 4, "clip_norm": 0.1},
    },
    "several epochs": {"batches": {"tokens": 4000, "shapes": 1}},
}


@pytest.mark.matrix(5)
@pytest.mark.parametrize("variant", VARIANTS)
def test_three_steps_and_three_more_are_six_to_the_bit(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    whole, broken = (new_run(tmp_path / name, corpus, **VARIANTS[variant]) for name in ("whole", "broken"))
    stopped_and_resumed(whole, broken, monkeypatch)


def test_two_resumes_of_one_checkpoint_are_alike_and_the_second_drops_what_the_first_wrote(
    tmp_path: Path, corpus: Path
) -> None:
    run = new_run(tmp_path / "run", corpus, train={"save_every": 3, "keep": 9})
    train(run, task_of(run))
    first = record(run)
    for path in checkpoint.steps(run.checkpoints)[1:]:
        (path / "state.json").unlink()
    train(run, task_of(run), resume=True)
    assert record(run) == first
    steps = [row["step"] for row in read_metrics(run.folder) if row["kind"] == "train"]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_line_of_metrics_that_was_cut_short_is_left_out(tmp_path: Path, corpus: Path) -> None:
    run = new_run(tmp_path / "run", corpus, train={"save_every": 3})
    train(run, task_of(run))
    first = record(run)
    lines = (run.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.folder / "metrics.jsonl").write_text("".join(lines[:4]) + lines[4][:20])
    (checkpoint.steps(run.checkpoints)[-1] / "manifest.json").unlink()
    train(run, task_of(run), resume=True)
    assert record(run) == first


@pytest.mark.slow
def test_no_batch_comes_twice_or_never(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    take = Stepper.step

    def note(stepper: Stepper, batches: Any, *arguments: Any) -> Any:
        seen.extend(bytes_of(batch.source) for batch in batches)
        return take(stepper, batches, *arguments)

    monkeypatch.setattr(Stepper, "step", note)
    run = new_run(tmp_path / "whole", corpus, train={"steps": 12})
    train(run, task_of(run))
    whole, seen[:] = list(seen), []
    run = new_run(tmp_path / "broken", corpus, train={"steps": 12})
    for _ in range(3):
        with monkeypatch.context() as patch:
            stop_after(patch, 3)
            assert train(run, task_of(run), resume=True) == 143
    train(run, task_of(run), resume=True)
    assert seen == whole
    assert len(set(whole)) > 6


@pytest.mark.parametrize("recipe", CALIBRATED)
def test_a_recipe_that_asks_for_it_is_calibrated_before_the_first_step_and_never_again(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    calls: list[int] = []
    real = placement.calibrate

    def note(model: Any, batch: Any) -> Any:
        found = real(model, batch)
        calls.append(len(found.encoder))
        assert bool((batch[0] != 0).any(dim=1).all())  # no row of padding alone
        return found

    monkeypatch.setattr(placement, "calibrate", note)
    run = new_run(tmp_path / "run", corpus, model={"recipe": recipe})
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        train(run, task_of(run))
    assert calls == [4]
    train(run, task_of(run), resume=True)
    assert calls == [4]
    scales = [tensor for name, tensor in checkpoint.load(checkpoint.steps(run.checkpoints)[0]).model.items() if "skip" in name]
    assert any(not torch.all(scale == 1) for scale in scales)


@pytest.mark.parametrize(("tokens", "batches"), [(1, 1), (400, None), (10**9, None)])
def test_it_is_calibrated_on_as_many_batches_as_make_the_tokens(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, batches: int | None
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(placement, "calibrate", lambda _, batch: given.append(batch))
    monkeypatch.setattr("kilolayer.training.trainer.TOKENS", tokens)
    run = new_run(tmp_path / "run", corpus, model={"recipe": CALIBRATED[0]})
    task = task_of(run)
    trainer = Trainer(run, task)
    before = trainer.batches.state()
    trainer.begin(None)
    assert trainer.batches.state() == before
    stream, expected = task.training_batches(run.config.train.seed), []
    while not expected or (sum(int((row != 0).sum()) for row in expected) < tokens and len(expected) < 200):
        source, _ = task.model_inputs(next(stream).parts)
        expected += [row[row != 0] for row in source]
        batches = batches if batches is None else batches - 1
    assert batches in (None, 0)
    ((source, target),) = given
    assert len(source) == len(target) == len(expected)
    for row, tokens_of_row in zip(source, expected, strict=True):
        assert torch.equal(row[row != 0], tokens_of_row)


@pytest.mark.slow
def test_a_signal_before_the_first_step_leaves_a_checkpoint_that_is_not_calibrated_again(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = new_run(tmp_path / "whole", corpus, model={"recipe": CALIBRATED[0]})
    train(whole, task_of(whole))
    run = new_run(tmp_path / "run", corpus, model={"recipe": CALIBRATED[0]})
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "__init__", lambda stop: setattr(stop, "signal", 15))
        assert train(run, task_of(run)) == 143
    assert [checkpoint.step_of(path) for path in checkpoint.steps(run.checkpoints)] == [0]
    monkeypatch.setattr(placement, "calibrate", lambda *_: pytest.fail("calibrated again"))
    train(run, task_of(run), resume=True)
    assert record(run) == record(whole)


def walk(value: Any, path: str, found: dict[str, Any], seen: set[int]) -> None:
    """All values that can be reached from an object, by the path to them."""
    if isinstance(value, torch.Tensor):
        found[path] = (str(value.dtype), tuple(value.shape), bytes_of(value), value.requires_grad, value.grad is None)
    elif isinstance(value, np.ndarray):
        found[path] = value.tobytes()
    elif value is None or isinstance(value, str | bytes | int | float | complex | Path | torch.dtype | torch.device):
        found[path] = value
    elif id(value) in seen or (callable(value) and not isinstance(value, nn.Module)):
        return
    elif isinstance(value, dict):
        seen.add(id(value))
        for key, entry in value.items():
            walk(entry, f"{path}[{key}]", found, seen)
    elif isinstance(value, list | tuple | set | frozenset):
        seen.add(id(value))
        for index, entry in enumerate(value):
            walk(entry, f"{path}[{index}]", found, seen)
    elif hasattr(value, "__dict__"):
        seen.add(id(value))
        for name, entry in vars(value).items():
            walk(entry, f"{path}.{name}", found, seen)


def differences(a: Trainer, b: Trainer) -> set[str]:
    """Paths of what differs between two trainers: their own attributes and all that these hold."""
    assert len(a.batches) == len(b.batches)  # makes both plans of the epoch, which come when they are asked for
    found: list[dict[str, Any]] = []
    for trainer in (a, b):
        values: dict[str, Any] = {}
        for name, value in vars(trainer).items():
            if name not in ("run", "task", "config"):
                walk(value, name, values, set())
        found.append(values)
    paths = (found[0].keys() | found[1].keys()) - {
        "optimizer.lr",
        "watch.optimizer.lr",
        "processes.step",
        "placement.processes.step",
    }  # set before each step
    return {path for path in paths if found[0].get(path, "-") != found[1].get(path, "-")}


def trainers_after_a_restore(run: Run, monkeypatch: pytest.MonkeyPatch, kind: type[Trainer]) -> tuple[Trainer, Trainer]:
    """One that has trained, and a new one that was restored from its checkpoint as the file holds it."""
    made: list[Trainer] = []

    class Remembered(kind):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(loop, "Trainer", Remembered)
    stop_after(monkeypatch, 5)
    assert train(run, task_of(run)) == 143
    random_state = torch.get_rng_state()
    restored = kind(run, task_of(run))
    assert differences(made[0], restored)
    restored.begin(checkpoint.load(checkpoint.steps(run.checkpoints)[-1]))
    assert torch.equal(torch.get_rng_state(), random_state)
    return made[0], restored


@pytest.mark.matrix(2)
@pytest.mark.parametrize("variant", ["dropout everywhere", "fp16", "calibrated"])
def test_everything_that_has_state_is_in_the_checkpoint(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    sections = {**VARIANTS[variant], "train": {"log_every": 4, "valid_every": 2, **VARIANTS[variant].get("train", {})}}
    run = new_run(tmp_path / "run", corpus, **sections)
    trained, restored = trainers_after_a_restore(run, monkeypatch, Trainer)
    assert differences(trained, restored) == set()
    assert restored.window.steps == 1
    assert restored.best.step is not None


def test_state_that_is_not_in_the_checkpoint_is_noticed(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(Trainer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.losses: list[float] = []
            model: Any = self.model
            model.calls = [0]
            model.register_forward_hook(lambda model, *_: model.calls.append(0))

        def state(self) -> Any:
            self.losses.append(1.0)
            return super().state()

    run = new_run(tmp_path / "run", corpus)
    trained, restored = trainers_after_a_restore(run, monkeypatch, Forgetful)
    calls = {f"{place}.calls[{index}]" for place in ("model", "placement.model") for index in range(1, 6)}
    assert differences(trained, restored) == {"losses[0]", *calls}


def test_a_checkpoint_of_other_data_or_another_vocabulary_is_refused(tmp_path: Path, corpus: Path) -> None:
    run = new_run(tmp_path / "run", corpus)
    train(run, task_of(run))
    other = new_run(tmp_path / "other", corpus, tokenizer={"vocab_size": 80})
    (run.folder / "tokenizer.model").write_bytes((other.folder / "tokenizer.model").read_bytes())
    with pytest.raises(InputError, match="vocabulary") as caught:
        train(run, task_of(run), resume=True)
    assert str(run.folder) in caught.value.where
    with pytest.raises(InputError, match="vocabulary"):
        run.load_model(torch.device("cpu"))
    shifted = new_run(tmp_path / "shifted", corpus, train={"seed": 2})
    (run.folder / "checkpoints").rename(shifted.checkpoints)
    with pytest.raises(InputError, match="another seed"):
        train(shifted, task_of(shifted), resume=True)


def test_a_checkpoint_of_another_shape_is_refused_by_name(tmp_path: Path, corpus: Path) -> None:
    run, wide = new_run(tmp_path / "run", corpus), new_run(tmp_path / "wide", corpus, model={"ffn_dim": 48})
    train(run, task_of(run))
    run.checkpoints.rename(wide.checkpoints)
    with pytest.raises(InputError, match=r"is \(32, 16\) there and \(48, 16\) here"):
        train(wide, task_of(wide), resume=True)


def test_training_stops_when_it_no_longer_gets_better_and_a_resume_adds_no_step(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([5.0, 4.0, 4.5, 4.2, 4.1, 3.0])
    real = TranslationTask.validate

    def scored(*arguments: Any) -> Any:
        found = real(*arguments)
        assert found is not None
        return type(found)(next(scores), None, {})

    monkeypatch.setattr(TranslationTask, "validate", scored)
    run = new_run(tmp_path / "run", corpus, train={"steps": 40, "valid_every": 2, "patience": 2, "keep": 1})
    assert train(run, task_of(run)) == 0
    before = record(run)
    assert before["step"] == 8
    assert json.loads(before["state"])["best"] == {"step": 4, "value": -4.0, "waited": 2}
    # The newest and the best are kept, and the best is the one that is used.
    assert [checkpoint.step_of(path) for path in checkpoint.steps(run.checkpoints)] == [4, 8]
    best = checkpoint.load(checkpoint.steps(run.checkpoints)[0]).model
    model = run.load_model(torch.device("cpu"))
    assert all(torch.equal(tensor, best[name]) for name, tensor in model.state_dict().items())
    assert train(run, task_of(run), resume=True) == 0
    assert record(run) == before


@pytest.mark.parametrize(("recipe", "plain"), [("deepnorm", "post_ln"), ("sub_ln", "sub_ln")])
def test_a_model_is_read_in_its_plain_form_where_it_has_one(tmp_path: Path, corpus: Path, recipe: str, plain: str) -> None:
    run = new_run(tmp_path / "run", corpus, model={"recipe": recipe}, train={"steps": 3})
    assert train(run, task_of(run)) == 0
    model, reader = run.load_model(torch.device("cpu")), run.load_reader(torch.device("cpu"))
    assert (model.config.recipe.name, reader.config.recipe.name) == (recipe, plain)
    source, target = torch.randint(4, 20, (2, 3, 5))
    torch.testing.assert_close(reader(source, target).logits, model(source, target).logits, rtol=1e-4, atol=1e-4)


def test_the_best_is_saved_only_where_it_is_wanted(tmp_path: Path, corpus: Path) -> None:
    options = {"steps": 5, "valid_every": 2, "save_every": 100, "save_best": False}
    run = new_run(tmp_path / "run", corpus, train=options)
    assert train(run, task_of(run)) == 0
    assert [checkpoint.step_of(path) for path in checkpoint.steps(run.checkpoints)] == [5]
    last = checkpoint.load(checkpoint.steps(run.checkpoints)[0])
    model = run.load_model(torch.device("cpu"))
    assert all(torch.equal(tensor, last.model[name]) for name, tensor in model.state_dict().items())


def test_a_validation_that_is_not_a_number_is_never_the_best() -> None:
    best = Best()
    assert best.update(TranslationValidation(float("nan"), None, {}).quality, 1)
    assert best.update(TranslationValidation(9.0, None, {}).quality, 2)
    assert not best.update(TranslationValidation(float("nan"), None, {}).quality, 3)
    assert (best.step, best.waited) == (2, 1)
    assert Best().update(TranslationValidation(1.0, 5.0, {}).quality, 1)


def test_bleu_is_what_counts_where_it_is_measured() -> None:
    best = Best()
    best.update(TranslationValidation(1.0, 10.0, {}).quality, 1)
    assert best.update(TranslationValidation(2.0, 11.0, {}).quality, 2)
    assert not best.update(TranslationValidation(0.1, 10.5, {}).quality, 3)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("average", [0, 2, 3])
def test_the_mean_of_the_last_checkpoints_is_used_where_it_is_asked_for(tmp_path: Path, corpus: Path, average: int) -> None:
    run = new_run(tmp_path / "run", corpus, train={"save_every": 1, "keep": 4, "average": average})
    train(run, task_of(run))
    paths = checkpoint.steps(run.checkpoints)
    assert [checkpoint.step_of(path) for path in paths] == [3, 4, 5, 6]
    weights = [checkpoint.load(path).model for path in (paths[-average:] if average else paths[-1:])]
    for name, tensor in run.load_model(torch.device("cpu")).state_dict().items():
        mean = torch.stack([each[name].double() for each in weights]).mean(dim=0).to(tensor.dtype)
        torch.testing.assert_close(tensor, mean, rtol=1e-7, atol=1e-8)


def test_a_damaged_newest_checkpoint_is_passed_over_by_training_and_by_loading(
    tmp_path: Path, corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(tmp_path / "run", corpus, train={"save_every": 2})
    train(run, task_of(run))
    before = record(run)
    newest = checkpoint.steps(run.checkpoints)[-1]
    (newest / "model.safetensors").write_bytes((newest / "model.safetensors").read_bytes()[:-1])
    run.load_model(torch.device("cpu"))
    train(run, task_of(run), resume=True)
    used, resumed = (message for message in caplog.messages if "step 6 is damaged (model.safetensors has" in message)
    assert "SHA-256" in used
    assert used.endswith("the weights of step 4 are used instead")
    assert "SHA-256" in resumed
    assert resumed.endswith("falling back to the one before")
    assert record(run) == before


def test_a_run_without_a_whole_checkpoint_cannot_be_used(tmp_path: Path, corpus: Path) -> None:
    run = new_run(tmp_path / "run", corpus)
    with pytest.raises(InputError, match="no complete checkpoint") as caught:
        run.load_model(torch.device("cpu"))
    assert caught.value.fix == "train it first"
