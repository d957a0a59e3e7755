"""An optimizer in a user's own file, the one that the documentation shows, in everything that a run does."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kilolayer as kl
from kilolayer.cli.main import main
from kilolayer.config import dump
from kilolayer.errors import InputError, OptionError, UnusedOptionError
from kilolayer.optimizers import registry
from kilolayer.optimizers.optimizer import make_optimizer
from kilolayer.runs.metrics import read_metrics
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.loop import train
from tests.fixtures.read_nothing import NothingIsRead
from tests.fixtures.small_runs import SMALL, new_run_of, record, stop_after, task_of

PAGE = (Path(__file__).parents[2] / "docs/extend.md").read_text()
ONE, YES, NO = torch.tensor(1.0), torch.tensor(True), torch.tensor(False)
LION = {"optimizer": "lion_file:Lion", "lr": 1e-3, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def _own_file(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The documentation's optimizer in a module on the path; the registry is as before after each test."""
    (block,) = [each for each in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if "class Lion" in each]
    folder = tmp_path_factory.mktemp("own")
    (folder / "lion_file.py").write_text(f"import kilolayer as kl\n\n\n{block}")
    monkeypatch.syspath_prepend(str(folder))
    for name in registry.names():  # registered now, or lost with what this test registers
        registry.find(name)
    monkeypatch.setattr(registry, "_registry", registry._registry.copy())
    yield
    sys.modules.pop("lion_file", None)


def small_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 7, bias=False))


def test_steps_are_those_of_a_loop_in_float64() -> None:
    model = small_model().double()
    optimizer = make_optimizer(model, TrainConfig(**LION, beta2=0.99), sums=True)
    expected = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    means = {name: torch.zeros_like(weight) for name, weight in expected.items()}
    for seed in range(5):
        torch.manual_seed(seed)
        for name, weight in model.named_parameters():
            weight.grad = torch.randn_like(weight)
            decay = 0.1 if weight.dim() > 1 else 0.0
            sign = (0.9 * means[name] + 0.1 * 0.5 * weight.grad).sign()
            expected[name] = (1 - 1e-3 * decay) * expected[name] - 1e-3 * sign
            means[name] = 0.99 * means[name] + 0.01 * 0.5 * weight.grad
        optimizer.collect()
        optimizer.update(ONE.double() / 2, YES)
        optimizer.clear()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.detach(), expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rounded", [False, True])
def test_a_step_that_may_be_recorded_reads_nothing_and_heeds_the_guard(rounded: bool) -> None:
    models = [small_model() for _ in range(2)]
    optimizers = []
    for model in models:
        precise = {weight: weight.detach().clone() for weight in model.parameters()} if rounded else None
        for weight in precise or ():
            weight.data = weight.data.bfloat16()
        optimizers.append(make_optimizer(model, TrainConfig(**LION), precise))
    waiting, other = optimizers
    other.waits = False
    for seed, finite in enumerate((YES, NO, YES)):
        for model in models:
            generator = torch.Generator().manual_seed(seed)
            for weight in model.parameters():
                weight.grad = (torch.randn(weight.shape, generator=generator) / (1 if finite else 0)).to(weight)
        waiting.update(ONE, finite)
        with NothingIsRead():
            other.update(ONE, finite)
    assert float(waiting.taken) == float(other.taken) == 2
    for name, tensor in waiting.precise().items():
        torch.testing.assert_close(other.precise()[name], tensor, rtol=1e-6, atol=1e-7)


def test_norms_of_changes_are_those_of_the_weights() -> None:
    model = small_model()
    optimizer = make_optimizer(model, TrainConfig(**LION), sums=True)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    optimizer.collect()
    found = optimizer.update(ONE, YES, measures=True)
    for group, norms in zip(optimizer.groups, found or [], strict=True):
        for name, norm in zip(group.names, norms, strict=True):
            change = (model.get_parameter(name).detach() - before[name]).norm()
            torch.testing.assert_close(norm, change)


def test_a_stopped_run_goes_on_to_the_bit_and_stacks_are_checked(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"train": {**LION, "steps": 20, "layers_every": 5, "accumulate": 2}}
    whole, broken = (new_run_of("causal_lm", tmp_path / name, corpus, **options) for name in ("whole", "broken"))
    assert train(whole, task_of(whole)) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        assert train(broken, task_of(broken)) == 143
    assert train(broken, task_of(broken), resume=True) == 0
    assert record(whole) == record(broken)
    rows = read_metrics(whole.folder)
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses[-1] < losses[0]
    assert [row["step"] for row in rows if row["kind"] == "stacks"] == [10, 20]
    assert {row["step"] for row in rows if row["kind"] == "layers"} == {1, 5, 10, 15, 20}


def test_the_plan_counts_its_bytes(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def memory(**options: Any) -> dict[str, int]:
        path = tmp_path / "config.toml"
        path.write_text(dump(SMALL["causal_lm"](corpus, train=options)))
        assert main(["plan", str(path), "--precision", "fp32", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        return {"parameters": found["parameters"]["total"], "bytes": found["training_memory"]["optimizer"]}

    adam, lion, sgd = memory(), memory(**LION), memory(optimizer={"name": "torch.optim:SGD", "momentum": 0.9})
    assert adam["bytes"] == 8 * adam["parameters"]
    assert lion["bytes"] == 4 * lion["parameters"]
    assert sgd["bytes"] == 4 * sgd["parameters"]
    muon = memory(optimizer="muon")
    assert 4 * muon["parameters"] < muon["bytes"] < 8 * muon["parameters"]


def test_what_it_does_not_read_is_refused_and_its_own_options_are_checked() -> None:
    with pytest.raises(UnusedOptionError, match="eps has no effect on the optimizer 'lion'"):
        TrainConfig(**LION, eps=1e-6)
    with pytest.raises(OptionError, match="unknown option 'momentun'; did you mean 'momentum'"):
        TrainConfig(optimizer={"name": "muon", "momentun": 0.9})
    with pytest.raises(OptionError, match=r"optimizer\.beta1 is an option of \[train\]"):
        TrainConfig(optimizer={"name": "adam", "beta1": 0.8})
    with pytest.raises(
        OptionError, match=r"unknown optimizer 'adamww'; did you mean 'adamw'.*\n.*or a class of yours: my_module:MyClass"
    ):
        TrainConfig(optimizer="adamww")
    with pytest.raises(OptionError, match="momentum must be at least 0 and below 1"):
        TrainConfig(optimizer={"name": "muon", "momentum": 1.0})
    assert TrainConfig(optimizer={"name": "adam"}).optimizer == "adam"
    assert TrainConfig(optimizer="muon").optimizer == {
        "name": "muon",
        "momentum": 0.95,
        "nesterov": True,
        "iterations": 5,
        "factor": "match_rms_adamw",
    }


def test_ending_a_run_when_a_stack_dies_needs_a_running_mean() -> None:
    @kl.optimizers.register
    class Sign(kl.optimizers.UpdateRule):
        def direction(self, gradient: Any, weight: Any, state: Any, count: Any) -> Any:
            return gradient.sign()

    with pytest.raises(UnusedOptionError, match="stop_when_dead has no effect on the optimizer 'sign'"):
        TrainConfig(optimizer="sign", stop_when_dead=True)
    for name in ("adam", "adamw", "radam", "muon", "lion_file:Lion"):
        assert TrainConfig(optimizer=name, stop_when_dead=True).stop_when_dead


def test_a_registered_name_is_known_and_a_taken_one_refused() -> None:
    cls = registry.find("lion_file:Lion")
    assert registry.find("lion") is cls
    assert "lion" in registry.names()
    with pytest.raises(OptionError, match="the optimizer 'adam' is built in"):

        @registry.register
        class Adam(kl.optimizers.UpdateRule):
            def direction(self, gradient: Any, weight: Any, state: Any, count: Any) -> Any:
                return gradient

    with pytest.raises(InputError, match="has no direction method"):

        @registry.register
        class Nothing(kl.optimizers.UpdateRule):
            pass

    with pytest.raises(InputError, match="is not an optimizer"):
        registry.find("torch.nn:Linear")


def test_names_are_known_before_torch_is_imported() -> None:
    import subprocess

    probe = "import sys, kilolayer as kl; assert 'muon' in kl.optimizers.names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
