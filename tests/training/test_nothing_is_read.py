"""A step that is recorded reads no number back from the device, which a recording must not do: seen on the CPU too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kilolayer as kl
from kilolayer.layers.embedding import Embedding
from kilolayer.optimizers.optimizer import Optimizer, make_optimizer
from kilolayer.runtime.recorder import Recorder
from kilolayer.speed.runtime import FAST
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.guard import Guard
from kilolayer.training.step import Stepper
from tests.fixtures.read_nothing import NothingIsRead
from tests.fixtures.small_classifiers import new_classifier
from tests.fixtures.small_runs import new_run, new_text_run, task_of


class StandIn:
    """For the kernels of update_kernel.py: sums and norms as they give them, and no update."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.groups = optimizer.groups

    def collect(self) -> None:
        for group in self.groups:
            group.collect()

    def norms(self) -> list[Tensor]:
        lists = [[each for each in group.gradients if each is not None] for group in self.groups]
        return [torch.stack([each.double().norm() for each in present]).norm() for present in lists]

    def update(self, factors: list[Tensor | None], finite: Tensor) -> None:
        pass


@pytest.mark.matrix(3)
@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize(
    ("options", "train"),
    [
        (
            {"dropout": 0.1, "attention_dropout": 0.1, "drop_path": 0.1},
            {"optimizer": "adamw", "weight_decay": 0.1, "layer_decay": 0.8},
        ),
        ({"recipe": kl.recipes.get("dlcl")}, {"optimizer": "radam", "clip_norm": 1.0, "accumulate": 2}),
        ({"recipe": kl.recipes.get("sub_ln"), "positions": "t5", "kv_heads": 1}, {"label_smoothing": 0.1}),
        ({"positions": "rotary", "moe": kl.MoE(experts=4, every=1)}, {"clip_norm": 1.0}),
        ({"moe": kl.MoE(experts=4, every=1, capacity=1.0, second="random", loss_free=1e-3, z_loss=1e-3)}, {}),
    ],
)
def test_a_step_reads_nothing_back(
    options: dict[str, Any], train: dict[str, Any], measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Embedding, "_check", lambda *_: None)  # reads on the CPU alone
    config = TrainConfig(lr=1e-3, warmup_steps=0, **train)
    model = kl.build_model(kl.ModelConfig(layers=2, dim=16, heads=2, ffn_dim=32, vocab_size=40, **options), seed=1).train()
    optimizer = make_optimizer(model, config, sums=config.accumulate > 1)
    optimizer.kernel = StandIn(optimizer)  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.waits = False
    stepper = Stepper(model, optimizer, config, Guard(scaled=False), torch.device("cpu"), runtime=FAST)
    stepper.measures = measured
    stepper.share.fill_(0.1)
    source, labels = torch.randint(4, 40, (3, 5)), torch.randint(4, 40, (3, 6))
    source[0, -2:], labels[0, -2:] = 0, 0
    with NothingIsRead():
        stepper.accumulate_and_update(source, labels.clone(), labels)
    assert stepper.measured.isfinite().all()
    assert float(optimizer.taken) == 1


class Watched(Recorder):
    """Counts the pieces that it runs; none of them may read anything."""

    count = 0

    def run(self, pieces: Any, **options: Any) -> Any:
        self.count += len(pieces)
        with NothingIsRead():
            return super().run(pieces, **options)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("kind", [new_run, new_text_run, new_classifier])
@pytest.mark.parametrize("model", [{}, {"positions": "rotary", "moe": {"experts": 4, "every": 1}}])
def test_the_loss_of_a_validation_batch_reads_nothing_back(
    kind: Any, model: dict[str, Any], tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Embedding, "_check", lambda *_: None)
    run = kind(tmp_path / "run", corpus, model=model)
    task, built = task_of(run), kl.build_model(run.config.model, seed=1)
    recorder = Watched(torch.device("cpu"))
    assert task.validate(built, 20, recorder) == task.validate(built, 20)
    assert recorder.count


@pytest.mark.parametrize("labels", [{}, {"kind": "number", "label": "score"}], ids=["classes", "numbers"])
def test_a_step_of_a_classifier_reads_nothing_back(
    labels: dict[str, Any], tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Embedding, "_check", lambda *_: None)
    smoothing = {} if labels else {"label_smoothing": 0.1}
    run = new_classifier(tmp_path / "run", corpus, examples=labels, model={"head": {"pool": "mean"}}, train=smoothing)
    task, config = task_of(run), run.config.train
    model = kl.build_model(run.config.model, seed=1).train()
    optimizer = make_optimizer(model, config)
    optimizer.kernel = StandIn(optimizer)  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.waits = False
    stepper = Stepper(model, optimizer, config, Guard(scaled=False), torch.device("cpu"), loss=task.loss, runtime=FAST)
    stepper.share.fill_(0.1)
    parts = next(task.training_batches(1)).parts
    with NothingIsRead():
        stepper.accumulate_and_update(*parts)
    assert stepper.measured.isfinite().all()
