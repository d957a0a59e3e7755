"""A checkpoint that is whole, but not of the form that the run needs: refused by file and key."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kilolayer.cli.main import main
from kilolayer.errors import InputError
from kilolayer.files.tensors import serialize
from kilolayer.runs import checkpoint
from kilolayer.runs.checkpoint import Checkpoint
from kilolayer.runs.run import Run
from kilolayer.training.loop import train
from kilolayer.training.trainer import Trainer
from tests.fixtures.small_runs import new_run, task_of

ODD = [None, True, "x", "1", [], [1, 2], {}, {"x": 1}, -1, 1.5, math.nan, math.inf, 10**30, 10**400]
SPARSE = {"model": {"moe": {"experts": 4, "every": 1}}, "train": {"steps": 2, "log_every": 4, "valid_every": 2}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Run:
    """A sparse model: its state has lists of numbers too."""
    run = new_run(tmp_path_factory.mktemp("saved") / "run", corpus, **SPARSE)
    assert train(run, task_of(run)) == 0
    return run


@pytest.fixture(scope="module")
def saved(run: Run) -> Checkpoint:
    return checkpoint.load(checkpoint.steps(run.checkpoints)[-1])


@pytest.fixture(scope="module")
def trainer(run: Run, saved: Checkpoint) -> Trainer:
    trainer = Trainer(run, task_of(run))
    trainer.begin(saved)
    return trainer


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside a JSON document; of a list to the first alone."""
    entries: list[tuple[Any, Any]] = list(value.items()) if isinstance(value, dict) else []
    if isinstance(value, list):
        entries = list(enumerate(value))[:1]
    for key, each in entries:
        yield (*path, key)
        yield from places(each, (*path, key))


def change(document: Any, path: tuple[Any, ...], act: Callable[[Any, Any], None]) -> Any:
    """A copy of a document in which something was done to the value at the end of a path."""
    changed = copy.deepcopy(document)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    act(inner, path[-1])
    return changed


@pytest.mark.slow
def test_any_value_of_another_form_is_refused_by_its_name(trainer: Trainer, saved: Checkpoint) -> None:
    errors: list[tuple[str, InputError]] = []
    for path in places(saved.state):
        for odd in ODD:
            state = change(saved.state, path, lambda inner, key, odd=odd: inner.__setitem__(key, odd))
            try:
                trainer.restore(replace(saved, state=state))
            except InputError as error:
                errors.append((path[0], error))
    assert len(errors) > 300
    for key, error in errors:
        assert error.fix
        if error.where != "the saved state of the data":
            assert error.where.endswith("step-00000002/state.json")
            assert key in error.what


@pytest.mark.parametrize("key", ["guard", "batches", "best", "window", "routing", "seconds", "vocabulary"])
def test_a_missing_key_is_named(trainer: Trainer, saved: Checkpoint, key: str) -> None:
    state = {name: value for name, value in saved.state.items() if name != key}
    with pytest.raises(InputError, match=f"{key} is missing") as caught:
        trainer.restore(replace(saved, state=state))
    assert caught.value.where.endswith("step-00000002/state.json")


def test_a_missing_key_inside_a_table_is_named(trainer: Trainer, saved: Checkpoint) -> None:
    state = change(saved.state, ("best", "waited"), lambda inner, key: inner.pop(key))
    with pytest.raises(InputError, match=r"best\.waited is missing"):
        trainer.restore(replace(saved, state=state))


def test_what_a_later_version_may_add_is_no_hindrance(trainer: Trainer, saved: Checkpoint) -> None:
    trainer.restore(replace(saved, state=saved.state | {"more": 1, "best": {**saved.state["best"], "more": 1}}))


MISFITS: dict[str, Callable[[dict[str, Tensor], str], Any]] = {
    "absent": lambda tensors, name: tensors.pop(name),
    "another's": lambda tensors, name: tensors.update({"other/mean": tensors[name]}),
    "wide": lambda tensors, name: tensors.update({name: torch.zeros(3, 5, 7)}),
    "one number": lambda tensors, name: tensors.update({name: torch.zeros(1)}),  # which would fit by broadcasting
    "whole numbers": lambda tensors, name: tensors.update({name: tensors[name].long()}),
    "in half": lambda tensors, name: tensors.update({name: tensors[name].half()}),
}


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("name", ["mean", "updates", "random.cpu"])
def test_an_optimizer_of_another_model_is_refused(trainer: Trainer, saved: Checkpoint, name: str, misfit: str) -> None:
    tensors = dict(saved.optimizer)
    found = next(each for each in tensors if each.endswith(name))
    MISFITS[misfit](tensors, found)
    with pytest.raises(InputError, match="other/mean" if misfit == "another's" else found) as caught:
        trainer.restore(replace(saved, optimizer=tensors))
    assert caught.value.where.endswith("step-00000002/optimizer.safetensors")


def test_a_random_state_that_is_none_is_refused(trainer: Trainer, saved: Checkpoint) -> None:
    noise = torch.full_like(saved.optimizer["random.cpu"], 255)
    with pytest.raises(InputError, match="random state"):
        trainer.restore(replace(saved, optimizer=saved.optimizer | {"random.cpu": noise}))


def test_a_run_of_a_gpu_goes_on_without_one(trainer: Trainer, saved: Checkpoint) -> None:
    trainer.restore(replace(saved, optimizer=saved.optimizer | {"random.cuda": torch.zeros(16, dtype=torch.uint8)}))
    assert torch.equal(torch.get_rng_state(), saved.optimizer["random.cpu"])


def rewrite(path: Path, name: str, data: bytes) -> None:
    """Change a file of a checkpoint, and its manifest too, as its author could."""
    (path / name).write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = checkpoint.fingerprint(path / name)
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.find_fault(path) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "the file holds no table"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"vocabulary": 3}', "vocabulary is a whole number, not a text"),
        ("{}", "vocabulary is missing"),
    ],
)
def test_the_command_names_file_and_key(
    tmp_path: Path, corpus: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path / "run", corpus, train={"steps": 1})
    train(run, task_of(run))
    path = checkpoint.steps(run.checkpoints)[-1]
    rewrite(path, "state.json", text.encode())
    capsys.readouterr()
    assert main(["train", "--resume", str(run.folder)]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert str(path / "state.json") in shown
    with pytest.raises(InputError):
        run.load_model(torch.device("cpu"))


def test_weights_of_another_kind_are_refused(tmp_path: Path, corpus: Path) -> None:
    run = new_run(tmp_path / "run", corpus, train={"steps": 1})
    train(run, task_of(run))
    path = checkpoint.steps(run.checkpoints)[-1]
    weights = checkpoint.load(path).model
    name = next(iter(weights))
    whole = b"".join(bytes(part) for part in serialize(weights | {name: weights[name].long()}))
    rewrite(path, "model.safetensors", whole)
    with pytest.raises(InputError, match=f"{name} is .* of torch.int64 there"):
        run.load_model(torch.device("cpu"))
