"""Which options of a run may change as it goes on; each that may trains on, and each other is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kilolayer.config import build, merge, option_paths
from kilolayer.data.held_out import HeldOut
from kilolayer.errors import InputError
from kilolayer.runs.changes import BREAKS, changes_between, check_changes, may_change, saved_config, state_with
from kilolayer.tasks import registry
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.schedule import announce, learning_rate
from tests.fixtures.small_runs import SMALL

RULES = [task.load_config().resume for task in registry.all_of()]
LISTED = [path for paths in may_change(*RULES).values() for path in paths]
REASONS = {**BREAKS, **{path: why for rules in RULES for path, why in rules.breaks.items()}}


def config_of(task: str, corpus: Path, **sections: Any) -> RunConfig:
    return build(RunConfig, SMALL[task](corpus, **sections))


def test_every_place_that_is_listed_is_an_option_and_stands_once() -> None:
    known = {path for task in registry.all_of() for path in option_paths(task.load_config())}
    tables = {path.partition(".")[0] for path in known}
    assert all(path in known or path in tables for path in [*LISTED, *REASONS])
    assert len(set(LISTED)) == len(LISTED)
    assert not set(LISTED) & set(REASONS)


@pytest.mark.parametrize("task", SMALL)
def test_a_checkpoint_tells_the_configuration_that_it_was_trained_with(corpus: Path, task: str) -> None:
    config = config_of(task, corpus)
    again = saved_config({**state_with(config, HeldOut()), "best": {}})
    assert again is not None
    assert changes_between(config, again) == []
    assert saved_config({}) is saved_config({"config": 3}) is saved_config({"config": "[train]\nnever_was = 1"}) is None


def test_every_option_that_differs_is_named_and_those_that_break_something_are_refused(corpus: Path) -> None:
    before = config_of("translation", corpus)
    over = {
        "model": {"dropout": 0.3},
        "train": {"steps": 9, "seed": 2, "label_smoothing": 0.2},
        "search": {"max_length_extra": 9},
    }
    now = build(RunConfig, merge(before.table(), over))
    changes = changes_between(before, now)
    found = {change.path: (change.before, change.now) for change in changes}
    assert found == {
        "model.dropout": (0.1, 0.3),
        "train.steps": (6, 9),
        "train.seed": (1, 2),
        "train.label_smoothing": (0.1, 0.2),
        "search.max_length_extra": (4, 9),
    }
    with pytest.raises(InputError) as caught:
        check_changes(changes, "runs/a/config.toml", "runs/a")
    assert caught.value.what.startswith("model.dropout, train.seed and train.label_smoothing cannot change")
    assert "belong to this model" in caught.value.what
    assert "train.seed is 2 (was 1)" in caught.value.where
    assert "runs/a/config.toml" in caught.value.where
    assert 'train={"start_from": "runs/a"}' in caught.value.fix
    check_changes([change for change in changes if change.allowed], "", "")


def test_an_option_that_is_absent_on_one_side_is_a_change(corpus: Path) -> None:
    before = config_of("causal_lm", corpus)
    now = build(RunConfig, merge(before.table(), {"text": {"stride": 4}}))
    assert [str(change) for change in changes_between(before, now)] == ["text.stride is 4 (was absent)"]
    assert [str(change) for change in changes_between(now, before)] == ["text.stride is absent (was 4)"]


@pytest.mark.parametrize(
    ("schedule", "old", "new"),
    [("cosine", 0.0, 0.5 * 0.01), ("linear", 0.0, 0.5 * 0.01), ("constant", 0.01, 0.01), ("inverse_sqrt", None, None)],
)
def test_the_learning_rate_before_and_after_is_said(corpus: Path, schedule: str, old: float | None, new: float | None) -> None:
    train = {"steps": 40, "warmup_steps": 0, "schedule": schedule}
    before = config_of("translation", corpus, train=train)
    now = replace(before, train=replace(before.train, steps=80))
    text = announce(before, now, 39)
    assert text is not None
    assert text.startswith("from step 40 on, train.steps is 80 (was 40); ")
    if old != new:
        assert f"the learning rate of step 40 is {new:.3g} ({schedule} over 80 steps), instead of {old:.3g}" in text
    else:
        assert f"stays what it would have been, {learning_rate(now.train, 40):.3g}" in text
    assert announce(before, before, 39) is None
    quiet = announce(before, replace(before, train=replace(before.train, log_every=7)), 39)
    assert quiet == "from step 40 on, train.log_every is 7 (was 1)"


def test_options_of_training_that_are_not_listed_are_refused(corpus: Path) -> None:
    before = config_of("translation", corpus).train
    odd: dict[str, Any] = {"beta1": 0.5, "clip_norm": 1.0, "weight_decay": 0.1, "precision": "fp32", "optimizer": "radam"}
    for name, value in odd.items():
        assert isinstance(before, TrainConfig)
        config = config_of("translation", corpus)
        (change,) = changes_between(config, replace(config, train=replace(before, **{name: value})))
        assert not change.allowed
        assert change.breaks
