"""The first layers of every stack are checked while a run trains: what is written, said and done about it."""

from __future__ import annotations

import importlib
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kilolayer as kl
from kilolayer.compare.result import Member, is_complete, result_of
from kilolayer.data.grammar import write_corpus
from kilolayer.evaluate.stack_label import StackCheck
from kilolayer.optimizers.optimizer import make_optimizer
from kilolayer.report.page import render, write_report
from kilolayer.report.record import read_record
from kilolayer.runs.metrics import read_metrics
from kilolayer.runs.run import Run
from kilolayer.tasks.token_loss import token_loss
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.guard import Guard
from kilolayer.training.loop import train
from kilolayer.training.stack_health import DyingStackError, StackWatch
from kilolayer.training.step import Stepper
from tests.fixtures.small_runs import new_run_of, record, stop_after, task_of

DYING = {
    "model": {"layers": 12, "recipe": {"name": "post_ln", "init": "xavier"}, "dropout": 0.0},
    "train": {"steps": 100, "lr": 1.0, "warmup_steps": 1, "schedule": "constant", "log_every": 10},
}


def trained(folder: Path, corpus: Path, task: str = "causal_lm", **sections: dict[str, Any]) -> Run:
    run = new_run_of(task, folder, corpus, **sections)
    assert train(run, task_of(run)) == 0
    return run


def rows_of(run: Run, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run.folder) if row["kind"] == kind]


def log_of(run: Run) -> str:
    return (run.folder / "log.txt").read_text()


@pytest.mark.slow
def test_a_stack_that_dies_is_first_said_to_fade_and_is_dead_at_the_end_alone(tmp_path: Path, corpus: Path) -> None:
    run = trained(tmp_path / "run", corpus, **DYING)
    said = [row["text"] for row in rows_of(run, "event")]
    assert said
    assert all("the gradient of the decoder's first layers is 1/" in text and "recovered" in text for text in said)
    lines = log_of(run).splitlines()
    (dead,) = [index for index, line in enumerate(lines) if "is dead" in line]
    assert "the decoder is dead: over the last tenth of the steps, the gradient of its first layers was 1/" in lines[dead]
    assert dead > max(index for index, line in enumerate(lines) if "step 100" in line)
    assert write_report(run.folder).warnings == []  # it has no scores: the run has not been tested, and may go on
    (run.folder / "scores.json").write_text('{"test": {"loss": 1.0}}')
    assert any("The decoder is dead" in warning for warning in write_report(run.folder).warnings)
    assert "The decoder is dead" in render(read_record(run.folder))


@pytest.mark.slow
def test_a_deep_narrow_deepnorm_is_said_to_fade_and_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of benchmarks/dead: 12 layers per side, which pass through a trough while the decoder learns frequencies."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks/dead"))
    design = importlib.import_module("design")
    known = next(run for run in design.runs() if run.name == "078 translation deepnorm 12L d32 lr0.002 w0.2")
    write_corpus(tmp_path)
    table = design.table_of(known, tmp_path, tmp_path)
    run = kl.train(table, run=tmp_path / "run", train={"stop_when_dead": True})
    said = [row["text"] for row in rows_of(run, "event")]
    assert any("the gradient of the encoder's first layers is 1/" in text and "recovered" in text for text in said)
    checks = [row["encoder"]["reached"] for row in rows_of(run, "stacks")]
    assert min(checks) < 0.01 < 0.1 < checks[-1]
    assert "dead" not in log_of(run)
    assert rows_of(run, "valid")[-1]["source_gain"] > 0.05


@pytest.mark.matrix(2)
@pytest.mark.parametrize("layers_every", [0, 5])
def test_every_check_is_written_whether_or_not_layers_are_measured(tmp_path: Path, corpus: Path, layers_every: int) -> None:
    run = trained(tmp_path / "run", corpus, "translation", train={"steps": 30, "layers_every": layers_every, "log_every": 7})
    rows = rows_of(run, "stacks")
    assert [row["step"] for row in rows] == [10, 20, 30]
    assert all(0 < row[side]["reached"] <= 1 for row in rows for side in ("encoder", "decoder"))


def test_checks_are_a_hundred_in_a_long_run(corpus: Path) -> None:
    model, config = kl.Decoder(24, 8, 2, 16, 2), TrainConfig(steps=5000)
    assert StackWatch(model, make_optimizer(model, config), config).every == 50


def test_a_run_that_is_to_stop_when_dead_ends_before_its_end_and_a_comparison_does_not_go_on_with_it(
    tmp_path: Path, corpus: Path
) -> None:
    train_options = {**DYING["train"], "stop_when_dead": True, "save_every": 8}
    run = new_run_of("causal_lm", tmp_path / "run", corpus, model=DYING["model"], train=train_options)
    with pytest.raises(DyingStackError, match="the first layers of the decoder have had almost no gradient"):
        train(run, task_of(run))
    (ended,) = [row for row in rows_of(run, "event") if "ended_by" in row]
    assert 30 <= ended["step"] < 100
    checks = [row["decoder"]["reached"] for row in rows_of(run, "stacks")]
    assert max(checks[-3:]) < 3e-4
    member = Member("run", {}, run.folder)
    assert is_complete(member)
    assert result_of(member).outcome.kind == "dead"
    assert result_of(member).outcome.text == f"decoder dying, ended at step {ended['step']}"
    with pytest.raises(DyingStackError):  # from the checkpoint before
        train(run, task_of(run), resume=True)
    assert "is dead" not in log_of(run)


def test_an_eps_that_hides_the_gradient_is_said_at_once_and_is_a_label_at_the_end(tmp_path: Path, corpus: Path) -> None:
    run = trained(tmp_path / "run", corpus, "translation", train={"steps": 12, "eps": 1e3})
    said = [(row["step"], row["text"]) for row in rows_of(run, "event") if "train.eps" in row["text"]]
    assert [step for step, _ in said] == [10, 10]
    assert log_of(run).count("is dead: over the last tenth of the steps, a step moved its first layers by") == 2


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rezero", *(pytest.param(each, marks=pytest.mark.slow) for each in ("deepnorm", "pre_ln"))])
def test_a_run_that_learns_is_not_dead(tmp_path: Path, corpus: Path, recipe: str) -> None:
    """ReZero's encoder gets no gradient at first, and is no exception: its branches have opened by the end."""
    options = {"steps": 60, "lr": 3e-3, "warmup_steps": 20}
    run = trained(tmp_path / "run", corpus, "translation", model={"recipe": recipe}, train=options)
    assert "is dead" not in log_of(run)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_class_of_torch_by_which_no_stack_can_be_checked_is_named_once(tmp_path: Path, corpus: Path, momentum: float) -> None:
    optimizer = {"name": "torch.optim:SGD", "momentum": momentum}
    run = trained(tmp_path / "run", corpus, train={"steps": 21, "optimizer": optimizer, "stop_when_dead": True})
    said = "train.stop_when_dead has no effect: SGD keeps no running mean of the gradient"
    assert log_of(run).count(said) == (momentum == 0)
    assert len(rows_of(run, "stacks")) == (3 if momentum else 0)


@pytest.mark.slow
def test_a_run_that_is_stopped_between_two_checks_says_what_the_undisturbed_one_says(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(tmp_path / "whole", corpus, **DYING)
    first = rows_of(whole, "event")[0]["step"]
    for stopped in (first - 1, first):
        broken = new_run_of("causal_lm", tmp_path / f"broken-{stopped}", corpus, **DYING)
        with monkeypatch.context() as patch:
            stop_after(patch, stopped)
            assert train(broken, task_of(broken)) == 143
        assert train(broken, task_of(broken), resume=True) == 0
        assert record(broken) == record(whole)


@pytest.mark.matrix(2)
@pytest.mark.parametrize(("optimizer", "decay"), [("adam", 0.0), ("adam", 0.1), ("adamw", 0.1), ("radam", 0.0)])
def test_what_the_moments_tell_is_what_a_loop_over_the_gradients_tells(optimizer: Any, decay: float) -> None:
    torch.manual_seed(0)
    config = TrainConfig(optimizer=optimizer, weight_decay=decay, lr=1e-5, beta2=0.9, eps=1e-3, log_every=1, device="cpu")
    model = kl.EncoderDecoder(24, 8, 2, 16, 2, 3, "pre_ln", dtype=torch.float64)
    stepper_optimizer = make_optimizer(model, config, sums=True)
    watch = StackWatch(model, stepper_optimizer, config)
    stepper = Stepper(
        model, stepper_optimizer, config, Guard(False), torch.device("cpu"), loss=partial(token_loss, smoothing=0.0)
    )
    means = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
    squares = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
    steps = 12
    for _ in range(steps):
        source, target, labels = torch.randint(1, 24, (3, 2, 5))
        loss = F.cross_entropy(model(source, target).logits.flatten(0, 1), labels.flatten())
        for (name, weight), gradient in zip(
            model.named_parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            coupled = decay if optimizer == "adam" and weight.dim() > 1 else 0.0
            means[name] = 0.9 * means[name] + 0.1 * gradient
            squares[name] = 0.9 * squares[name] + 0.1 * (gradient + coupled * weight.detach()) ** 2
        batch = type("Batch", (), {"parts": (source, target, labels), "tokens": labels.numel()})()
        stepper.step([batch], config.lr)
    left1, left2 = 1 - 0.9**steps, 1 - 0.9**steps
    found = watch.measure(steps)

    def norm(prefix: str) -> float:
        return math.sqrt(sum(float((mean / left1).square().sum()) for name, mean in means.items() if name.startswith(prefix)))

    layers = [f"encoder.blocks.{layer}." for layer in range(2)] + [f"decoder.blocks.{layer}." for layer in range(3)]
    for side, check in found.items():
        first = f"{side}.blocks.0."
        assert check.reached == pytest.approx(norm(first) / max(map(norm, layers)), rel=1e-3)
        if optimizer != "radam":
            moved = [
                float((means[name] / left1 / ((squares[name] / left2).sqrt() + 1e-3)).square().mean().sqrt())
                for name in means
                if name.startswith(first)
            ]
            assert check.moved == pytest.approx(max(moved), rel=1e-3)


def test_at_a_rate_of_zero_the_gradient_is_still_measured() -> None:
    model, config = kl.Decoder(24, 8, 2, 16, 2), TrainConfig(steps=100)
    optimizer = make_optimizer(model, config)
    optimizer.taken.fill_(20)
    optimizer.lr.zero_()
    for group in optimizer.groups:
        group.buffers["mean"].fill_(1.0)
        group.buffers["square"].fill_(1.0)
    (check,) = StackWatch(model, optimizer, config).measure(100).values()
    assert check.reached == pytest.approx(1.0)
    assert math.isnan(check.moved)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("recipe", kl.recipes.names())
def test_an_encoder_gets_no_gradient_at_first_where_branches_start_at_zero(recipe: str) -> None:
    model = kl.EncoderDecoder(24, 8, 2, 16, 2, 2, recipe, dtype=torch.float64)
    source, target, labels = torch.randint(1, 24, (3, 2, 5))
    F.cross_entropy(model(source, target).logits.flatten(0, 1), labels.flatten()).backward()
    gradients = [weight.grad for weight in model.encoder.blocks[0].parameters() if weight.grad is not None]
    assert all(not gradient.any() for gradient in gradients) == (recipe in ("rezero", "r_fixup"))


def test_a_checkpoint_keeps_what_was_seen_and_said() -> None:
    model, config = kl.Decoder(24, 8, 2, 16, 2), TrainConfig(steps=200)
    whole, resumed = (StackWatch(model, make_optimizer(model, config), config) for _ in range(2))
    low = [{"decoder": StackCheck(step, 1e-6, 0.1)} for step in (10, 20, 30)]
    assert len(whole.take_in(low[0])) == 1
    resumed.load_state(json.loads(json.dumps(whole.state())))
    for checks in low[1:]:
        assert resumed.take_in(checks) == whole.take_in(checks) == []
    assert whole.dying(30) == resumed.dying(30) == ["decoder"]
