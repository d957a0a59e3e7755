"""Detects runs that all fail for the same reason before any takes a step, so that no more of them are started."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from kilolayer.compare.grid import same
from kilolayer.compare.result import Member

FAILURES = 3
"""The number of runs that fail alike after which no more are started."""
NUMBERS = re.compile(r"[0-9a-fx]*\d[0-9a-fx]*")
"""Sizes, line numbers and addresses, which are ignored when two failures are compared."""


@dataclass
class CommonFailure:
    """members: the latest runs that failed, all for the reason `text`. learns: whether any run has taken a step."""

    members: list[Member] = field(default_factory=list)
    text: str = ""
    learns: bool = False

    def add(self, member: Member, text: str) -> None:
        """Add a run that has failed."""
        alike = NUMBERS.sub("#", text) == NUMBERS.sub("#", self.text)
        self.members, self.text = [*(self.members if alike else []), member], text

    @property
    def is_reached(self) -> bool:
        """Whether the other runs can be expected to fail too."""
        return not self.learns and len(self.members) >= FAILURES

    def in_order(self, waiting: Sequence[Member]) -> Sequence[Member]:
        """The waiting runs, in their order (longest first) as long as none has failed or one has learned.

        Otherwise the runs that share the fewest options with a failed one come first, and of these the shortest: another recipe
        or another size may not fail.
        """
        if self.learns or not self.members:
            return waiting
        shortest_first = list(reversed(waiting))
        return sorted(shortest_first, key=lambda member: max(_shared(member, failed) for failed in self.members))


def _shared(one: Member, other: Member) -> int:
    return sum(same({name: value}, {name: other.options.get(name)}) for name, value in one.options.items())
