"""Which of a task's own options may change when a run is resumed, and why the others may not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

OTHER_BATCHES = "its position in the data would refer to different batches"
OTHER_TOKENS = "the rows of its embedding tables belong to these tokens"


@dataclass(frozen=True)
class ResumeRules:
    """Options by their dotted names; the name of a table stands for all of its options. All others may not change.

    files: paths of files, which are stored as absolute paths; whether the data in them are still the same is checked by their
    content (`Task.held_out`, `Batches.load_state`).
    testing: how a run is tested.
    breaks: why an option may not change, where there is more to say than that the steps so far were taken with the other value.
    """

    files: tuple[str, ...] = ()
    testing: tuple[str, ...] = ()
    breaks: Mapping[str, str] = field(default_factory=dict)

    def __or__(self, other: ResumeRules) -> Self:
        """The rules of both, for a task that extends another."""
        files, testing = (
            tuple(dict.fromkeys((*mine, *theirs)))
            for mine, theirs in ((self.files, other.files), (self.testing, other.testing))
        )
        return type(self)(files, testing, {**self.breaks, **other.breaks})
