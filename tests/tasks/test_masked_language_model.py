"""A masked language model in the loop: what `test_every_task.py` does not combine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kilolayer import recipes
from kilolayer.runs.metrics import read_metrics
from kilolayer.training.loop import train
from kilolayer.training.step import Stepper
from kilolayer.training.trainer import Trainer
from tests.fixtures.small_runs import bytes_of, last_checkpoint, new_run_of, stopped_and_resumed, task_of

CALIBRATED = [name for name in recipes.names() if recipes.get(name).calibration() is not None]
SPANS = {"span": 3.0, "keep": 0.1, "random": 0.1}
VARIANTS: dict[str, dict[str, Any]] = {
    "pieces, spans, some kept": {"tokenizer": {"kind": "unigram", "vocab_size": 330}, "masking": SPANS},
    "bf16": {"train": {"precision": "bf16"}},
    "several epochs": {"batches": {"tokens": 48 * 256}},
}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("variant", [pytest.param(name, marks=pytest.mark.slow if name == "bf16" else ()) for name in VARIANTS])
def test_three_steps_and_three_more_are_six_to_the_bit(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    whole, broken = (new_run_of("masked_lm", tmp_path / name, corpus, **VARIANTS[variant]) for name in ("whole", "broken"))
    found = stopped_and_resumed(whole, broken, monkeypatch)
    if variant == "several epochs":
        assert json.loads(found["state"])["batches"]["epoch"] > 0


def test_few_shapes_of_batches_are_read_and_each_has_labels(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    take = Stepper.step

    def note(stepper: Stepper, batches: Any, *arguments: Any) -> Any:
        for batch in batches:
            seen.append(tuple(part.shape for part in batch.parts))
            assert batch.tokens == int((batch.parts[-1] != 0).sum()) > 0
        return take(stepper, batches, *arguments)

    monkeypatch.setattr(Stepper, "step", note)
    run = new_run_of("masked_lm", tmp_path / "run", corpus, train={"steps": 40})
    train(run, task_of(run))
    row, hidden = (8, 48), (8, 7)
    assert len(seen) == 40
    assert set(seen) <= {(*[row] * count, hidden, hidden) for count in (1, 2, 3)}
    assert len(set(seen)) > 1


def test_it_learns(tmp_path: Path, corpus: Path) -> None:
    run = new_run_of(
        "masked_lm", tmp_path / "run", corpus, train={"steps": 45, "lr": 5e-3, "valid_every": 15}, model={"dropout": 0.0}
    )
    train(run, task_of(run))
    valid = [row for row in read_metrics(run.folder) if row["kind"] == "valid"]
    assert [row["step"] for row in valid] == [15, 30, 45]
    assert valid[-1]["loss"] < valid[0]["loss"]
    assert valid[-1]["accuracy"] > valid[0]["accuracy"] >= 0


def test_the_scales_of_a_calibrated_recipe_come_from_documents(tmp_path: Path, corpus: Path) -> None:
    run = new_run_of("masked_lm", tmp_path / "run", corpus, model={"recipe": CALIBRATED[0], "dropout": 0.0}, train={"steps": 1})
    train(run, task_of(run))
    scales = {name: tensor for name, tensor in last_checkpoint(run).model.items() if name.endswith("skip.weight")}
    assert len(scales) == 4
    assert all(float(tensor.flatten()[0]) != 1.0 for name, tensor in scales.items() if "blocks.0.self_attention" not in name)


def test_each_process_takes_every_second_batch(tmp_path: Path, corpus: Path) -> None:
    run = new_run_of("masked_lm", tmp_path / "run", corpus, train={"accumulate": 2})
    task = task_of(run)
    stream = task.training_batches(run.config.train.seed)
    batches = [next(stream) for _ in range(80)]  # more than an epoch
    for rank in range(2):
        trainer = Trainer(run, task)
        trainer.processes.rank, trainer.processes.size = rank, 2
        taken = [batch for _ in range(20) for batch in trainer.take_batches()]
        for ours, theirs in zip(taken, batches[rank::2], strict=True):
            assert [bytes_of(part) for part in ours.parts] == [bytes_of(part) for part in theirs.parts]
        assert trainer.batches.epoch > 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # the compiler warns about itself
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recorded_steps_follow_eager_ones(tmp_path: Path, corpus: Path, precision: str) -> None:
    losses = []
    for eager in (False, True):
        options = {"device": "cuda", "eager": eager, "steps": 40, "precision": precision, "lr": 1e-3}
        run = new_run_of("masked_lm", tmp_path / str(eager), corpus, model={"dropout": 0.0}, train=options)
        assert train(run, task_of(run)) == 0
        losses.append([row["loss"] for row in read_metrics(run.folder) if row["kind"] == "train"])
    assert losses[0] == pytest.approx(losses[1], rel=0.02 if precision == "bf16" else 1e-3)
