"""The text that a run does not learn from, told apart by its content: wherever it lies, it is the same one or another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeldOut:
    """Digests of what a run is validated and tested on; None: there is no such part, or its task does not tell."""

    valid: str | None = None
    test: str | None = None
