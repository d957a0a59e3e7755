"""The loss that the probes measure, and the model that they measure it on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kilolayer.layers.modules import in_mode
from kilolayer.models.model import Model
from kilolayer.probe.subject import BatchLoss, starting_model, training_loss
from kilolayer.training.loop import train
from kilolayer.training.trainer import Trainer
from tests.fixtures.small_runs import new_run, new_run_of, new_text_run, task_of

CPU = torch.device("cpu")


def real(row: Tensor) -> Tensor:
    return row[row != 0][None]


def by_row(task: str, model: Any, parts: tuple[Tensor, ...]) -> tuple[float, int]:
    """The loss summed over the rows of a batch, each read alone and without padding, and the labels counted."""
    total, count = 0.0, 0
    for row in range(len(parts[0])):
        if not (parts[0][row] != 0).any():
            continue
        *inputs, labels = (
            ([*(real(part[row]) for part in parts[:-1]), parts[-1][row]])
            if task == "classify"
            else [real(part[row]) for part in parts]
        )
        scores = model(*inputs).logits.double().log_softmax(-1)
        chosen = labels.reshape(-1, 1)
        total -= float(scores.reshape(len(chosen), -1).gather(1, chosen).sum())
        count += len(chosen)
    return total, count


@pytest.mark.parametrize("task", ["translation", "causal_lm", "classify"])
def test_it_is_the_mean_over_labels_without_padding_dropout_or_smoothing(task: str, corpus: Path, tmp_path: Path) -> None:
    run = new_run_of(task, tmp_path / "run", corpus, train={"label_smoothing": 0.1})
    subject = task_of(run)
    model = starting_model(run.config, subject, CPU)
    loss = training_loss(subject, seed=1, batches=3)
    with torch.no_grad():
        sums = [by_row(task, model, batch.parts) for batch in loss.batches]
        assert float(loss(model)) == pytest.approx(sum(total for total, _ in sums) / sum(count for _, count in sums), rel=1e-5)
    assert loss.labels == sum(count for _, count in sums)


def test_what_training_minimizes_is_smoothed_and_has_the_loss_of_the_routers(corpus: Path, tmp_path: Path) -> None:
    moe = {"experts": 4, "top_k": 2, "every": 1}
    run = new_text_run(tmp_path / "run", corpus, train={"label_smoothing": 0.1}, model={"moe": moe})
    task = task_of(run)
    model = starting_model(run.config, task, CPU)
    (batch,) = training_loss(task, 1, 1).batches
    with torch.no_grad():
        output = model(batch.parts[0])
        scores = output.logits.log_softmax(-1)
        chosen = scores.gather(2, batch.parts[1][..., None])[..., 0]
        expected = -(0.9 * chosen + 0.1 * scores.mean(-1)).mean() + output.router_loss
        assert float(output.router_loss) > 0
        assert float(BatchLoss(task, [batch], of="total")(model)) == pytest.approx(float(expected), rel=1e-5)


def test_the_standard_error_is_that_of_the_batches_means(corpus: Path, tmp_path: Path) -> None:
    run = new_text_run(tmp_path / "run", corpus)  # all batches have as many labels
    task = task_of(run)
    model = starting_model(run.config, task, CPU)
    loss = training_loss(task, 1, 5)
    with torch.no_grad():
        means = [float(BatchLoss(task, [batch])(model)) for batch in loss.batches]
    assert loss.standard_error(model) == pytest.approx(np.std(means, ddof=1) / np.sqrt(5), rel=1e-6)
    assert np.isnan(BatchLoss(task, loss.batches[:1]).standard_error(model))


def same(model: Model, weights: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_the_starting_model_is_the_one_that_training_starts_with(corpus: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", corpus, model={"recipe": "admin"})
    task = task_of(run)
    random = torch.get_rng_state()
    found = starting_model(run.config, task, CPU)
    assert torch.equal(random, torch.get_rng_state())
    trainer = Trainer(run, task)
    trainer.begin(None)
    assert same(found, trainer.state().model)
    assert any(not (tensor == 1).all() for name, tensor in found.state_dict().items() if "skip" in name)
    with in_mode(found, training=False):
        assert not any(module.training for module in found.modules())


def test_a_model_that_starts_from_a_run_has_its_weights(corpus: Path, tmp_path: Path) -> None:
    first = new_text_run(tmp_path / "first", corpus, train={"steps": 2})
    assert train(first, task_of(first)) == 0
    second = new_text_run(tmp_path / "second", corpus, train={"start_from": str(first.folder)})
    found = starting_model(second.config, task_of(second), CPU)
    assert same(found, first.load_model(CPU).state_dict())
