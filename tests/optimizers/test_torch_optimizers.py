"""Optimizers of torch by name: their own steps, with the guard, the clipping, the checkpoints and the metrics of all others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kilolayer as kl
from kilolayer.errors import OptionError
from kilolayer.optimizers.optimizer import make_optimizer
from kilolayer.runs.metrics import read_metrics
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.loop import train
from tests.fixtures.small_runs import new_run_of, record, stop_after, task_of

ONE, YES, NO = torch.tensor(1.0), torch.tensor(True), torch.tensor(False)
KINDS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {},
    "NAdam": {},
    "RMSprop": {"alpha": 0.9, "centered": True, "momentum": 0.5},
    "Adagrad": {},
    "Adafactor": {},
}


def config_of(kind: str, **options: Any) -> TrainConfig:
    return TrainConfig(optimizer={"name": f"torch.optim:{kind}", **KINDS[kind]}, lr=0.01, weight_decay=0.1, **options)


def decoder(recipe: str = "deepnorm") -> kl.Decoder:
    torch.manual_seed(1)
    return kl.Decoder(24, 8, 2, 16, 2, recipe)


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_torchs_own_on_parameter_groups(kind: str) -> None:
    model, peer = (decoder("complete_p") for _ in range(2))
    config = config_of(kind, layer_decay=0.5)
    ours = make_optimizer(model, config)
    groups = kl.parameter_groups(peer, lr=0.01, weight_decay=0.1, layer_decay=0.5)
    for group in groups:
        if kind == "Adafactor":
            group.pop("eps", None)
    shared = {"betas": (0.9, 0.98)} if kind in ("Adam", "NAdam") else {}
    theirs = getattr(torch.optim, kind)(groups, lr=0.01, **shared, **KINDS[kind])
    for seed in range(4):
        give_gradients(model, seed)
        give_gradients(peer, seed)
        ours.collect()
        ours.update(ONE, YES)
        ours.clear()
        ours.update(ONE, NO)  # changes nothing
        theirs.step()
    for (name, a), b in zip(model.named_parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def take_step(model: nn.Module, optimizer: Any, seed: int) -> None:
    give_gradients(model, seed)
    optimizer.collect()
    optimizer.update(ONE, YES)
    optimizer.clear()


@pytest.mark.matrix(3)
@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_round_to_the_bit(kind: str) -> None:
    straight, broken = (decoder() for _ in range(2))
    whole, first = (make_optimizer(each, config_of(kind)) for each in (straight, broken))

    for seed in range(3):
        take_step(straight, whole, seed)
        take_step(broken, first, seed)
    fresh = make_optimizer(broken, config_of(kind))
    fresh.load({name: tensor.clone() for name, tensor in first.tensors().items()})
    for seed in range(3, 5):
        take_step(straight, whole, seed)
        take_step(broken, fresh, seed)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), broken.parameters(), strict=True))


@pytest.mark.matrix(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_stopped_run_goes_on_to_the_bit(
    tmp_path: Path, corpus: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = {"name": "torch.optim:SGD", **KINDS["SGD"]}
    options = {"optimizer": optimizer, "lr": 0.1, "steps": 12, "layers_every": 4, "clip_norm": 1.0, "precision": precision}
    whole, broken = (new_run_of("causal_lm", tmp_path / name, corpus, train=options) for name in ("whole", "broken"))
    assert train(whole, task_of(whole)) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        assert train(broken, task_of(broken)) == 143
    assert train(broken, task_of(broken), resume=True) == 0
    assert record(whole) == record(broken)
    rows = read_metrics(whole.folder)
    assert [row["step"] for row in rows if row["kind"] == "stacks"] == [10, 12]
    norms = [row["update"]["decoder"] for row in rows if row["kind"] == "layers"]
    assert all(norm > 0 for row in norms for norm in row)


class Counting(torch.optim.Optimizer):
    """A decaying rate, counted as optimizers outside torch do: by numbers in the state, or in the parameter group."""

    in_group = False

    def __init__(self, params: Any, lr: float = 1e-3, warmth: float = 1 / 3) -> None:
        super().__init__(params, {"lr": lr, "warmth": warmth})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                kept = group if self.in_group else self.state[weight]
                kept["step"] = kept.get("step", 0) + 1
                kept["warmth"] = kept.get("warmth", group["warmth"]) * 0.9
                kept["odd"] = not kept.get("odd", False)
                assert [type(kept[name]) for name in ("step", "warmth", "odd")] == [int, float, bool]
                weight.sub_(weight.grad, alpha=group["lr"] * kept["warmth"] / kept["step"] * (2 if kept["odd"] else 1))


class CountingInGroup(Counting):
    in_group = True


@pytest.mark.parametrize("kind", [Counting, CountingInGroup])
def test_numbers_that_an_optimizer_keeps_go_round_to_the_bit(kind: type[Counting]) -> None:
    config = TrainConfig(optimizer=f"{__name__}:{kind.__name__}", lr=0.01)  # pyright: ignore[reportArgumentType]
    straight, broken = (decoder() for _ in range(2))
    whole, first = (make_optimizer(each, config) for each in (straight, broken))
    take_step(straight, whole, 1)
    take_step(broken, first, 1)
    saved = {name: tensor.clone() for name, tensor in first.tensors().items()}
    fresh = make_optimizer(broken, config)
    fresh.load(saved)
    assert fresh.tensors().keys() == saved.keys() != {"updates"}
    take_step(straight, whole, 2)
    take_step(broken, fresh, 2)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), broken.parameters(), strict=True))


class Remembering(torch.optim.SGD):
    """Keeps a list in the parameter group."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0].setdefault("seen", []).append(1)
        return super().step(closure)


def test_a_class_that_keeps_what_no_checkpoint_holds_is_refused() -> None:
    config = TrainConfig(optimizer=f"{__name__}:Remembering", lr=0.01)  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match="Remembering keeps seen, a list, which no checkpoint would hold"):
        make_optimizer(decoder(), config)


@pytest.mark.parametrize("kind", ["LBFGS", "SparseAdam"])
def test_a_class_that_needs_more_than_dense_gradients_is_refused_before_a_run(kind: str) -> None:
    config = TrainConfig(optimizer=f"torch.optim:{kind}", lr=0.01)  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match=f"{kind} cannot make one update from gradients alone"):
        make_optimizer(decoder(), config)
    with pytest.raises(OptionError, match=f"{kind} cannot make one update from gradients alone"):
        config.rule.state_bytes(decoder())
