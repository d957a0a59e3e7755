"""Runs that fail one after another for one reason before any takes a step: after a few of them, no other is worth a start."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from kilolayer.compare.grid import same
from kilolayer.compare.result import Member

FAILURES = 3
"""Runs that fail alike after which no other is started."""
NUMBERS = re.compile(r"[0-9a-fx]*\d[0-9a-fx]*")
"""Sizes, lines and addresses, which may differ in what is otherwise one failure."""


@dataclass
class FailingAlike:
    """members: the last runs that failed, all for the reason `text`. learns: whether any run has taken a step."""

    members: list[Member] = field(default_factory=list)
    text: str = ""
    learns: bool = False

    def add(self, member: Member, text: str) -> None:
        """One more run that has failed."""
        alike = NUMBERS.sub("#", text) == NUMBERS.sub("#", self.text)
        self.members, self.text = [*(self.members if alike else []), member], text

    @property
    def enough(self) -> bool:
        """Whether all other runs would fail too."""
        return not self.learns and len(self.members) >= FAILURES

    def in_order(self, waiting: Sequence[Member]) -> Sequence[Member]:
        """The runs that wait, longest first; in doubt those first that share the fewest options with one that has failed.

        Of equals then the shortest goes first: another recipe or another size may not fail.
        """
        if self.learns or not self.members:
            return waiting
        shortest_first = list(reversed(waiting))
        return sorted(shortest_first, key=lambda member: max(_shared(member, failed) for failed in self.members))


def _shared(one: Member, other: Member) -> int:
    return sum(same({name: value}, {name: other.options.get(name)}) for name, value in one.options.items())
