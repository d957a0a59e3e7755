"""A stack that stops learning is named at the step where it happens, once, and a healthy one never."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_runs import new_run_of, record, stop_after, task_of

import kilolayer as kl
from kilolayer.compare.result import Member, is_complete, result_of
from kilolayer.report.page import render, write_report
from kilolayer.report.record import read_record
from kilolayer.tasks.token_loss import token_loss
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.dead_stacks import DeadStackError, StackPulse, StackWatch
from kilolayer.training.guard import Guard
from kilolayer.training.loop import train
from kilolayer.training.metrics import read_metrics
from kilolayer.training.norms import LayerNorms
from kilolayer.training.optimizer import Optimizer
from kilolayer.training.run import Run
from kilolayer.training.step import Stepper

DYING = {
    "model": {"layers": 8, "recipe": "post_ln", "dropout": 0.0},
    "train": {"steps": 20, "lr": 0.1, "warmup_steps": 1, "log_every": 5},
}

LIVING = [("deepnorm", 0), ("pre_ln", 10), ("rezero", 10)]


def trained(folder: Path, corpus: Path, task: str = "causal_lm", **sections: dict[str, Any]) -> Run:
    run = new_run_of(task, folder, corpus, **sections)
    assert train(run, task_of(run)) == 0
    return run


def deaths(run: Run) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run.folder) if row["kind"] == "event"]


@pytest.mark.parametrize(
    ("layers_every", "steps"), [pytest.param(0, 100, marks=pytest.mark.slow), (10, 20)]
)  # the moments forget slowly
def test_a_deep_post_ln_at_a_high_rate_is_found_dead_once(tmp_path: Path, corpus: Path, layers_every: int, steps: int) -> None:
    sections = {"model": DYING["model"], "train": {**DYING["train"], "steps": steps, "layers_every": layers_every}}
    run = trained(tmp_path / "run", corpus, **sections)
    (death,) = deaths(run)
    assert death["dead"] == "decoder"
    assert 20 <= death["step"] <= steps
    assert death["text"].startswith(f"step {death['step']}: the decoder is dead: the gradient of its first layers is ")
    assert death["text"] in (run.folder / "log.txt").read_text()
    assert any("the decoder is dead" in warning for warning in write_report(run.folder).warnings)
    assert "the decoder is dead" in render(read_record(run.folder))


def test_a_run_that_is_to_stop_when_dead_ends_there_and_a_comparison_does_not_go_on_with_it(
    tmp_path: Path, corpus: Path
) -> None:
    options = {**DYING["train"], "steps": 60, "layers_every": 10, "save_every": 8}
    run = new_run_of("causal_lm", tmp_path / "run", corpus, model=DYING["model"], train={**options, "stop_when_dead": True})
    with pytest.raises(DeadStackError, match="the decoder no longer learns"):
        train(run, task_of(run))
    (death,) = deaths(run)
    assert death["step"] < 60
    assert [row["step"] for row in read_metrics(run.folder) if row["kind"] == "train"][-1] == death["step"]
    member = Member("run", {}, run.folder)
    assert is_complete(member)
    assert result_of(member).outcome.text == f"decoder dead from step {death['step']}"
    with pytest.raises(DeadStackError):  # from the checkpoint before
        train(run, task_of(run), resume=True)


def test_a_stack_that_died_before_ends_a_run_that_is_now_to_stop_there(tmp_path: Path, corpus: Path) -> None:
    options = {**DYING["train"], "layers_every": 10}
    run = trained(tmp_path / "run", corpus, model=DYING["model"], train=options)
    assert not is_complete(Member("run", {}, run.folder))  # it is not scored, and was to go on
    with pytest.raises(DeadStackError, match="the decoder no longer learns"):
        kl.train(resume=run.folder, train={"steps": 24, "stop_when_dead": True})


def test_an_eps_that_hides_the_gradient_is_named(tmp_path: Path, corpus: Path) -> None:
    run = trained(tmp_path / "run", corpus, "translation", train={"steps": 12, "eps": 1e3, "log_every": 5})
    assert [(row["step"], row["dead"]) for row in deaths(run)] == [(10, "encoder"), (10, "decoder")]
    assert all("train.eps" in row["text"] for row in deaths(run))


@pytest.mark.parametrize(
    ("recipe", "layers_every"), [("rezero", 0), *(pytest.param(*each, marks=pytest.mark.slow) for each in LIVING)]
)
def test_a_run_that_learns_is_not_found_dead(tmp_path: Path, corpus: Path, recipe: str, layers_every: int) -> None:
    options = {"steps": 40, "lr": 1e-3, "warmup_steps": 400, "log_every": 10, "layers_every": layers_every}
    assert not deaths(trained(tmp_path / "run", corpus, "translation", model={"recipe": recipe}, train=options))


@pytest.mark.slow
def test_a_run_that_is_stopped_between_two_looks_finds_the_death_of_the_undisturbed_one(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = {"model": DYING["model"], "train": {**DYING["train"], "steps": 30, "layers_every": 5}}
    whole = trained(tmp_path / "whole", corpus, **sections)
    (death,) = deaths(whole)
    for stopped in (death["step"] - 1, death["step"]):  # it knows the check before, and that the death was reported
        broken = new_run_of("causal_lm", tmp_path / f"broken-{stopped}", corpus, **sections)
        with monkeypatch.context() as patch:
            stop_after(patch, stopped)
            assert train(broken, task_of(broken)) == 143
        assert train(broken, task_of(broken), resume=True) == 0
        assert record(broken) == record(whole)


@pytest.mark.parametrize(("optimizer", "decay"), [("adam", 0.0), ("adam", 0.1), ("adamw", 0.1), ("radam", 0.0)])
def test_what_the_moments_tell_is_what_a_loop_over_the_gradients_tells(optimizer: Any, decay: float) -> None:
    torch.manual_seed(0)
    config = TrainConfig(optimizer=optimizer, weight_decay=decay, lr=1e-5, beta2=0.9, eps=1e-3, log_every=1, device="cpu")
    model = kl.EncoderDecoder(24, 8, 2, 16, 2, 3, "pre_ln", dtype=torch.float64)
    stepper_optimizer = Optimizer(model, config, sums=True)
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
    found = {pulse.side: pulse for pulse in watch.measure(config.lr)}

    def norm(prefix: str) -> float:
        return math.sqrt(sum(float((mean / left1).square().sum()) for name, mean in means.items() if name.startswith(prefix)))

    layers = [f"encoder.blocks.{layer}." for layer in range(2)] + [f"decoder.blocks.{layer}." for layer in range(3)]
    for side, pulse in found.items():
        first = f"{side}.blocks.0."
        assert pulse.first == pytest.approx(norm(first), rel=1e-3)
        assert pulse.largest == pytest.approx(max(map(norm, layers)), rel=1e-3)
        if optimizer != "radam":
            moved = [
                float((means[name] / left1 / ((squares[name] / left2).sqrt() + 1e-3)).square().mean().sqrt())
                for name in means
                if name.startswith(first)
            ]
            assert pulse.moved == pytest.approx(max(moved), rel=1e-3)


def test_the_rule_wants_two_looks_and_no_rise() -> None:
    pulse = StackPulse("encoder", first=5e-4, largest=1.0, moved=0.3)
    assert pulse.fault(1e-3, before=None) is None
    assert pulse.fault(1e-3, before=2e-3) is None
    assert pulse.fault(1e-3, before=4e-4) is None  # it rises, as that of a recipe whose branches open
    assert "5.0e-04 of the largest" in str(pulse.fault(1e-3, before=6e-4))
    assert StackPulse("encoder", 0.1, 1.0, moved=1e-4).fault(1e-3, None) is not None
    assert StackPulse("encoder", 0.1, 1.0, moved=1e-4).fault(1.0, None) is None  # a large rate makes up for a large eps


@pytest.mark.parametrize(
    ("recipe", "shares", "dead_at"),
    [
        ("rezero", [4e-5, 3e-5, 2e-5, 2e-5], None),  # its branches have not opened yet
        ("rezero", [4e-5, 2e-3, 5e-4, 4e-4], 40),
        ("deepnorm", [4e-5, 3e-5, 2e-5, 2e-5], 20),
    ],
)
def test_branches_that_start_at_zero_must_open_before_they_can_die(
    recipe: str, shares: list[float], dead_at: int | None
) -> None:
    model, config = kl.Decoder(24, 8, 2, 16, 2, recipe), TrainConfig(log_every=10, layers_every=10)
    optimizer = Optimizer(model, config)
    optimizer.taken.fill_(10)
    for group in optimizer.groups:
        group.buffers["means"].fill_(1.0)
        group.buffers["squares"].fill_(1.0)
    watch = StackWatch(model, optimizer, config)
    for step, share in zip((10, 20, 30, 40), shares, strict=True):
        watch.find_dead(step, config.lr, LayerNorms(gradient={"decoder": [share, 1.0]}))
    assert watch.found_dead["decoder"] == dead_at


@pytest.mark.parametrize("recipe", kl.recipes.names())
def test_an_encoder_gets_no_gradient_at_first_where_branches_start_at_zero(recipe: str) -> None:
    model = kl.EncoderDecoder(24, 8, 2, 16, 2, 2, recipe, dtype=torch.float64)
    source, target, labels = torch.randint(1, 24, (3, 2, 5))
    F.cross_entropy(model(source, target).logits.flatten(0, 1), labels.flatten()).backward()
    gradients = [weight.grad for weight in model.encoder.blocks[0].parameters() if weight.grad is not None]
    assert all(not gradient.any() for gradient in gradients) == model.config.recipe.zero_branches


def test_measured_gradients_are_read_where_every_look_has_them() -> None:
    model = kl.Decoder(24, 8, 2, 16, 2)
    for every, reads in ((0, False), (5, True), (10, True), (3, False), (40, False)):
        config = TrainConfig(log_every=10, layers_every=every)
        optimizer = Optimizer(model, config)
        optimizer.taken.fill_(10)
        watch = StackWatch(model, optimizer, config)
        for step in (10, 20):
            watch.find_dead(step, 1.0, LayerNorms(gradient={"decoder": [1.0, 2.0]}))
        assert (watch.before["decoder"] == 0.5) is reads


def test_a_checkpoint_keeps_what_was_seen_and_told() -> None:
    model, config = kl.Decoder(24, 8, 2, 16, 2), TrainConfig(log_every=10, layers_every=10)
    optimizer = Optimizer(model, config)
    optimizer.taken.fill_(10)
    for group in optimizer.groups:
        group.buffers["means"].fill_(1.0)
        group.buffers["squares"].fill_(1.0)
    whole, resumed = StackWatch(model, optimizer, config), StackWatch(model, optimizer, config)
    low = LayerNorms(gradient={"decoder": [1e-6, 1.0]})
    assert whole.find_dead(10, config.lr, low) == {}
    resumed.load_state(json.loads(json.dumps(whole.state())))
    assert resumed.find_dead(20, config.lr, low) == whole.find_dead(20, config.lr, low) != {}
    told = StackWatch(model, optimizer, config)
    told.load_state(json.loads(json.dumps(whole.state())))
    assert told.find_dead(30, config.lr, low) == {}
