"""Skips steps whose loss or gradient is not finite, and ends the run if there are too many of them."""

from __future__ import annotations

from kilolayer.errors import KilolayerError

TOLERATED = 10


class DivergedError(KilolayerError):
    """Too many steps in a row were not finite: training cannot continue."""


class Guard:
    """Counts skipped steps. In fp16 it also sets the loss scale: halved by a skip, doubled after 2,000 good steps."""

    GROWTH_STEPS = 2000

    def __init__(self, scaled: bool) -> None:
        self.scaled = scaled
        self.scale = 2.0**15 if scaled else 1.0
        self.in_a_row = 0
        self.skipped = 0
        self.good = 0

    def accept(self) -> None:
        """Count a finite step."""
        self.in_a_row = 0
        self.good += 1
        if self.scaled and self.good % self.GROWTH_STEPS == 0:
            self.scale = min(self.scale * 2, 2.0**24)

    def skip(self, step: int, what: str) -> str:
        """Count a step that must not change the state; return the message to log."""
        self.in_a_row += 1
        self.skipped += 1
        self.good = 0
        if self.scaled:
            self.scale = max(self.scale / 2, 1.0)
        return f"step {step} skipped: {what} is not finite"

    def check(self, step: int) -> None:
        """Raise if too many steps in a row were skipped."""
        if self.in_a_row >= TOLERATED:
            raise DivergedError(
                f"{self.in_a_row} steps in a row were not finite",
                where=f"step {step}",
                fix="lower train.lr, lengthen train.warmup_steps, set train.clip_norm = 1.0, or train in bf16 or fp32",
            )

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "in_a_row": self.in_a_row, "skipped": self.skipped, "good": self.good}

    def load_state(self, state: dict[str, float]) -> None:
        self.scale = float(state["scale"])
        self.in_a_row, self.skipped, self.good = (int(state[name]) for name in ("in_a_row", "skipped", "good"))
