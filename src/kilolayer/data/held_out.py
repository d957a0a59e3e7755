"""Identify the text that a run does not learn from by its content, independent of where its files are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeldOut:
    """Digests of a run's validation and test text; None if there is no such part, or the task does not provide one."""

    valid: str | None = None
    test: str | None = None
