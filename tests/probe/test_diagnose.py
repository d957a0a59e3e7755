"""A diagnosis of configurations and runs of every task: it measures the model of training, and leaves the run as it is."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.config import build, dump
from kilolayer.errors import InputError, OptionError
from kilolayer.files.tensors import load_tensors
from kilolayer.models.build import build_model
from kilolayer.probe.diagnosis import Settings
from kilolayer.probe.diagnosis_page import render_diagnosis
from kilolayer.runs import checkpoint
from kilolayer.runs.metrics import read_metrics
from kilolayer.runs.run import Run
from kilolayer.tasks.config import RunConfig
from kilolayer.training.loop import train
from tests.fixtures.small_runs import LAYERED, SMALL, bytes_of, last_checkpoint, new_run_of, task_of

SLOW = pytest.mark.slow
SPARSE = {"moe": {"experts": 2, "every": 1}}


def trained(folder: Path, corpus: Path, task: str, **sections: dict[str, Any]) -> Run:
    options = {"steps": 4, "save_every": 2, **sections.pop("train", {})}
    run = new_run_of(task, folder, corpus, train=options, **sections)
    assert train(run, task_of(run)) == 0
    return run


@pytest.mark.parametrize("task", ["masked_lm", *(pytest.param(task, marks=SLOW) for task in LAYERED if task != "masked_lm")])
def test_a_configuration_of_every_task_is_diagnosed(tmp_path: Path, corpus: Path, task: str) -> None:
    path = tmp_path / "small.toml"
    options = {"schedule": "warmup_stable_decay", "decay_steps": 2, "min_lr": 1e-4, "optimizer": "radam"}
    path.write_text(dump(SMALL[task](corpus, model=SPARSE, train=options)))
    state = torch.get_rng_state()
    found = kl.diagnose(path, device="cpu")
    assert torch.equal(torch.get_rng_state(), state)
    measured = found.measured
    assert all(math.isfinite(norm) for norms in measured.gradients.layers.values() for norm in norms)
    assert {len(norms) for norms in measured.gradients.layers.values()} == {2}
    assert set(measured.entropy) == set(measured.residual) == set(measured.gradients.layers)
    assert json.loads(json.dumps(found.table()))["measured"]["loss"] == pytest.approx(measured.loss)
    page = render_diagnosis("<a & b>", found)
    assert "<svg" in page
    assert "&lt;a &amp; b&gt;" in page
    assert "<script" not in page


def test_a_configuration_is_measured_on_its_own_device_and_threads(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(config: RunConfig, _task: object) -> None:
        torch.set_num_threads(config.train.threads)
        raise InputError(f"the device is {config.train.device}")

    monkeypatch.setattr("kilolayer.probe.diagnose.Trial", stop)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = build(RunConfig, SMALL["translation"](corpus, train={"device": "cpu", "threads": 3}))
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for typed, device in (("auto", "cpu"), ("cuda", "cuda")):
        with pytest.raises(InputError, match=f"the device is {device}"):
            kl.diagnose(config, device=typed)
    assert threads == [3, torch.get_num_threads()] * 2


@pytest.mark.parametrize("task", ["classify", *(pytest.param(task, marks=SLOW) for task in LAYERED if task != "classify")])
def test_a_run_is_measured_at_its_checkpoint_and_its_change_against_its_start(tmp_path: Path, corpus: Path, task: str) -> None:
    run = trained(tmp_path / "run", corpus, task)
    before = {name: bytes_of(tensor) for name, tensor in last_checkpoint(run).model.items()}
    found = kl.diagnose(str(run.folder), device="cpu").measured
    assert {name: bytes_of(tensor) for name, tensor in last_checkpoint(run).model.items()} == before
    assert found.settings.step == 4
    assert [change.step for change in found.changes] == [2, 4]
    # By hand: the run's first batch, its first weights, and those of the checkpoint.
    own = task_of(run)
    parts = own.on_device(next(own.training_batches(run.config.train.seed)).parts)
    start, later = (build_model(run.config.model, seed=run.config.train.seed).eval() for _ in range(2))
    later.load_state_dict(load_tensors(checkpoint.steps(run.checkpoints)[-1] / "model.safetensors"))
    with torch.no_grad():
        first, last = (own.loss(model, parts, hidden_states=True) for model in (start, later))
        assert found.loss == pytest.approx(float(last.total / last.count), rel=1e-5)
        ids = own.model_inputs(parts)
        tokens = next(iter(ids.values())) if isinstance(ids, dict) else ids[-1]
        real = tokens != 0 if tokens.dim() == 2 else slice(None)  # every patch of an image
        a, b = (x[: len(tokens)][real] for x in (first.output.states, last.output.states))
        assert found.changes[-1].size == pytest.approx(float((b - a).norm() / a.norm()), rel=1e-4)
    assert kl.diagnose(run, at=2, device="cpu").measured.settings.step == 2


@pytest.mark.slow
def test_the_first_steps_are_those_of_the_run(tmp_path: Path, corpus: Path) -> None:
    table = SMALL["translation"](corpus, train={"save_every": 2, "steps": 4})
    found = kl.diagnose(build(RunConfig, table), steps=4, device="cpu").measured.changes
    assert [change.step for change in found] == [1, 2, 3, 4]
    run = trained(tmp_path / "run", corpus, "translation")
    expected = {change.step: change.size for change in kl.diagnose(run, device="cpu").measured.changes}
    assert {change.step: change.size for change in found if change.step in expected} == pytest.approx(expected, rel=1e-3)


def test_a_stack_that_is_dead_at_the_end_is_in_the_verdict(tmp_path: Path, corpus: Path) -> None:
    run = trained(tmp_path / "run", corpus, "translation", train={"steps": 10, "eps": 1e3, "log_every": 10})
    found = kl.diagnose(run, device="cpu")
    assert not found.healthy
    assert [finding.where for finding in found.findings if finding.kind == "dead"] == ["encoder", "decoder"]
    (said,) = [line for line in found.verdict() if line.startswith("The encoder is dead: over the last tenth of the steps")]
    assert "train.eps hides" in said
    assert found.options()[0].startswith('train={"eps": 1e-')
    slower = [option for finding in found.findings if finding.kind == "dead" for option in finding.options]
    assert slower
    assert not any('"eps"' in option for option in slower)  # a larger one would hide more


@pytest.mark.matrix(3)
@pytest.mark.parametrize(("gain", "step", "found"), [(0.01, 10, 0.01), (0.01, 4, None), ("much", 10, None)])
def test_what_the_source_is_worth_comes_from_a_validation_of_the_second_half(
    tmp_path: Path, corpus: Path, gain: Any, step: int, found: float | None
) -> None:
    run = trained(tmp_path / "run", corpus, "translation", train={"steps": 10, "valid_every": 100, "log_every": 10})
    rows = [row for row in read_metrics(run.folder) if row["kind"] != "valid"]
    rows.append({"kind": "valid", "step": step, "loss": 3.0, "source_gain": gain})
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    diagnosis = kl.diagnose(run, device="cpu")
    assert diagnosis.measured.source_gain == found
    assert ("source not read" in [each.kind for each in diagnosis.findings]) == (found is not None)


@pytest.mark.slow
def test_a_run_whose_start_is_gone_is_measured_without_its_change(tmp_path: Path, corpus: Path) -> None:
    first = trained(tmp_path / "first", corpus, "causal_lm")
    second = trained(tmp_path / "second", corpus, "causal_lm", train={"start_from": str(first.folder)})
    whole = kl.diagnose(second, device="cpu").measured
    shutil.rmtree(first.folder)
    found = kl.diagnose(second, device="cpu").measured
    assert len(whole.changes) == 2
    assert found.changes == ()
    assert found.loss == whole.loss


def test_a_model_is_diagnosed_with_a_loss() -> None:
    model = kl.Encoder(24, 16, 2, 32, 4, "deepnorm")
    tokens = torch.randint(1, 24, (2, 6))
    loss = lambda m: m(tokens).logits.square().mean()  # noqa: E731
    found = kl.diagnose(model, loss, settings=Settings(lr=1e-4, warmup_steps=1000))
    assert isinstance(found, kl.Diagnosis)
    assert found.healthy
    assert found.verdict()[0].startswith("Healthy")
    assert model.training
    with pytest.raises(InputError, match="with a loss"):
        kl.diagnose(model)


def test_a_device_that_is_not_there_is_refused_before_any_work(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object) -> None:
        raise AssertionError("data are read")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = new_run_of("causal_lm", tmp_path / "run", corpus)
    monkeypatch.setattr("kilolayer.probe.diagnose.prepare", work)
    monkeypatch.setattr(Run, "task", work)
    config = build(RunConfig, SMALL["causal_lm"](corpus, train={"device": "cuda"}))
    for source, device in ((config, "auto"), (run.config, "cuda"), (run, "cuda")):
        with pytest.raises(OptionError, match="there is no CUDA device") as raised:
            kl.diagnose(source, device=device)
        assert ('device="cpu"' if device == "cuda" else 'train={"device": "cpu"}') in str(raised.value)
    with pytest.raises(AssertionError, match="data are read"):
        kl.diagnose(config, device="cpu")


def test_what_is_not_there_is_refused(tmp_path: Path, corpus: Path) -> None:
    run = new_run_of("translation", tmp_path / "run", corpus)
    with pytest.raises(InputError, match="no complete checkpoint"):
        kl.diagnose(run)
    with pytest.raises(InputError, match="not a run"):
        kl.diagnose(tmp_path)
    with pytest.raises(InputError, match="has no checkpoints"):
        kl.diagnose(run.config, at=3)
    with pytest.raises(InputError, match="steps is -1"):
        kl.diagnose(run.config, steps=-1)
    with pytest.raises(InputError, match=r"steps is 1\.5"):
        kl.diagnose(run.config, steps=1.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="no complete checkpoint"):
        kl.diagnose(kl.load(run.folder))  # a run as kl.load returns it is that of its folder
    with pytest.raises(InputError, match="what is diagnosed is None"):
        kl.diagnose(None)  # pyright: ignore[reportArgumentType]
