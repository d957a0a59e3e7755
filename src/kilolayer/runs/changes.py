"""Which options may change when a run is resumed, and why the others may not.

Changes come from options given with `--resume`, or from edits of the run's config.toml.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from operator import or_
from typing import Any

from kilolayer import hints
from kilolayer.config import Table, build, dump, parse_toml
from kilolayer.data.held_out import HeldOut
from kilolayer.errors import InputError, KilolayerError, shown
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.resume_rules import ResumeRules

SCHEDULE = ("train.steps", "train.lr", "train.min_lr", "train.schedule", "train.warmup_steps", "train.decay_steps")
SHARED: dict[str, tuple[str, ...]] = {
    "how long it trains, and at which learning rate": (*SCHEDULE, "train.patience", "train.stop_when_dead"),
    "how many batches make a step": ("train.accumulate",),
    "what is measured, logged and kept": (
        *("train.log_every", "train.layers_every", "train.valid_every", "train.save_every", "train.save_best"),
        *("train.keep", "train.average", "train.tensorboard", "train.trackers"),
    ),
    "where and how it computes": (
        "train.device",
        "train.threads",
        "train.recompute",
        "train.eager",
        "train.timeout",
        "train.shard",
        "train.shard_unit",
        "train.reshard_after_forward",
    ),
}
"""The options of all tasks that may change when a run is resumed."""
BREAKS = {
    "task": "a run learns one task",
    "model": "its weights and its optimizer state belong to this model",
    "train.seed": "it determines the order of the data",
    "train.epochs": "a run that has begun counts steps: set train.steps",
    "train.warmup_share": "a run that has begun counts steps: set train.warmup_steps",
    "train.start_from": "its weights have already been trained further",
    "train.freeze": "its optimizer state covers only the weights that were trained",
    "train.optimizer": "its optimizer state belongs to the other optimizer",
    "train.valid_sentences": "the best validation so far was measured on a different number",
}
OTHERWISE = "its steps so far were taken with the other value"


def may_change(*rules: ResumeRules) -> dict[str, tuple[str, ...]]:
    """The options that may change in runs of tasks with these rules, by what they are about."""
    own = reduce(or_, rules, ResumeRules())
    return {**SHARED, "where its files are": own.files, "how it is tested": own.testing}


@dataclass(frozen=True)
class Change:
    """An option whose value differs in the resumed run, with its value before and now; None: the option is absent.

    rules: those of the run's task.
    """

    path: str
    before: Any
    now: Any
    rules: ResumeRules = field(default_factory=ResumeRules, repr=False)

    @property
    def allowed(self) -> bool:
        """Whether a run that has begun can be resumed with this change."""
        paths = sum(may_change(self.rules).values(), ())
        return any(self.path == each or self.path.startswith(f"{each}.") for each in paths)

    @property
    def breaks(self) -> str:
        """Why the change is not allowed."""
        known = {**BREAKS, **self.rules.breaks}
        return known.get(self.path) or known.get(self.path.partition(".")[0]) or OTHERWISE

    def __str__(self) -> str:
        now, before = ("absent" if value is None else shown(value) for value in (self.now, self.before))
        return f"{self.path} is {now} (was {before})"


def changes_between(before: RunConfig, now: RunConfig) -> list[Change]:
    """The options that differ between two configurations, by their dotted names."""
    old, new = (dict(_flat(each.table())) for each in (before, now))
    differing = [path for path in {**old, **new} if old.get(path) != new.get(path)]
    return [Change(path, old.get(path), new.get(path), now.resume) for path in differing]


def changes_asked(before: RunConfig, tables: Table) -> list[Change]:
    """The options of a configuration that tables would change, by their dotted names; names that it does not have are left
    out."""
    old = dict(_flat(before.table()))
    return [Change(path, old[path], now, before.resume) for path, now in _flat(tables) if old.get(path, now) != now]


def check_changes(changes: Sequence[Change], where: str, folder: str, fix: str = "leave it as it was") -> None:
    """Raise if any of the changes is not allowed in a run that has begun."""
    refused = [change for change in changes if not change.allowed]
    if refused:
        names = ", ".join(change.path for change in refused[:-1])
        names = f"{names} and {refused[-1].path}" if names else refused[-1].path
        raise InputError(
            f"{names} cannot change in a run that has begun: {refused[0].breaks}",
            where=f"{where}: {'; '.join(map(str, refused))}",
            fix=f"{fix}; {_from_weights(folder)}",
        )


def _from_weights(folder: str) -> str:
    return f"a new run can start from the weights of this one: {hints.option('train.start_from', folder)}"


def state_with(config: RunConfig, held_out: HeldOut) -> dict[str, Any]:
    """What a checkpoint stores about its configuration and about the validation and test sets."""
    return {"config": dump(config.table()), "held_out": asdict(held_out)}


def saved_config(state: Mapping[str, Any]) -> RunConfig | None:
    """The configuration that a checkpoint was trained with; None if it is missing or of another version."""
    text = state.get("config")
    try:
        return build(RunConfig, parse_toml(text)) if isinstance(text, str) else None
    except (KilolayerError, ValueError):
        return None


def check_validation(state: Mapping[str, Any], now: HeldOut, folder: str) -> None:
    """Raise if the validation set has changed since the checkpoint: losses on different texts cannot be compared."""
    best = state.get("best")
    validated = isinstance(best, dict) and best.get("step") is not None
    if validated and "validation" in _other_parts(state, now):
        raise InputError(
            "the validation set has changed: the best validation so far was measured on the old one",
            where=f"the saved state of {folder}",
            fix=f"restore its files; {_from_weights(folder)}",
        )


def announce_held_out(state: Mapping[str, Any], now: HeldOut, step: int) -> str | None:
    """A message saying that a held-out set has changed which no choice so far depended on; None if none has."""
    parts = _other_parts(state, now)
    if not parts:
        return None
    named = f"{parts[0]} set has" if len(parts) == 1 else f"{' and '.join(parts)} sets have"
    return f"from step {step + 1:,} on, the {named} changed: the data in the files are different"


def _other_parts(state: Mapping[str, Any], now: HeldOut) -> list[str]:
    """The held-out sets whose text differs from the checkpoint's; a set that one of the two did not record is left out."""
    saved = state.get("held_out")
    before = saved if isinstance(saved, dict) else {}
    pairs = {"validation": (before.get("valid"), now.valid), "test": (before.get("test"), now.test)}
    return [part for part, both in pairs.items() if None not in both and both[0] != both[1]]


def _flat(table: Table, above: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables, by their dotted names."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
