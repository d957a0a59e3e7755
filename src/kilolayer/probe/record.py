"""What became of runs on which a rule of the diagnosis fired: how often it is right, and how often it is wrong.

The numbers are those of benchmarks/diagnose/errors.json: small models whose end is known, for vanishing gradients also those of
vanishing.json. Failed is a run that diverged, has a dead stack or did not read its source at its end. A run that neither failed
nor learned made no progress; most such were slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kilolayer.terminal import counted

Moment = Literal["start", "half", "end"]


@dataclass(frozen=True)
class Record:
    """Runs that were seen in a state, how many of these failed, and how many learned."""

    runs: int
    failed: int
    learned: int

    def sentence(self, did: str) -> str:
        """In words; did: what is said of the runs."""
        return f"Of {counted(self.runs, 'run')} that {did}, {self.failed} failed and {self.learned} learned."


RECORDS: dict[Moment, dict[str, Record]] = {
    "start": {
        "all": Record(707, 153, 457),
        "vanishing gradient": Record(39, 28, 4),
        "exploding gradient": Record(0, 0, 0),
        "eps": Record(0, 0, 0),
        "collapsed states": Record(44, 35, 4),
        "residual growth": Record(0, 0, 0),
        "narrow attention": Record(0, 0, 0),
        "dead ReLUs": Record(8, 8, 0),
        "none": Record(663, 118, 453),
    },
    "half": {
        "all": Record(43, 13, 20),
        "eps": Record(2, 2, 0),
        "collapsed states": Record(22, 12, 1),
        "residual growth": Record(2, 2, 0),
        "narrow attention": Record(1, 1, 0),
        "dead ReLUs": Record(23, 13, 1),
    },
    "end": {
        "all": Record(43, 13, 20),
        "eps": Record(2, 2, 0),
        "collapsed states": Record(20, 11, 0),
        "residual growth": Record(2, 2, 0),
        "narrow attention": Record(2, 2, 0),
        "dead ReLUs": Record(22, 12, 1),
    },
}
"""By finding; "all": of all runs that were measured; "none": of those without a finding."""
DID: dict[Moment, str] = {"start": "began so", "half": "were so after half of their steps", "end": "ended so"}
FADED: dict[float, dict[float, Record]] = {
    0.1: {1e-2: Record(72, 47, 25), 1e-3: Record(38, 27, 11), 1e-4: Record(16, 16, 0)},
    0.25: {1e-2: Record(136, 104, 17), 1e-3: Record(77, 75, 0), 1e-4: Record(38, 38, 0)},
    0.5: {1e-2: Record(145, 120, 4), 1e-3: Record(114, 104, 1), 1e-4: Record(87, 87, 0)},
    0.75: {1e-2: Record(143, 117, 2), 1e-3: Record(115, 104, 1), 1e-4: Record(97, 95, 1)},
}
"""By part of the run's steps: the runs whose first layers got less than a share of the largest layer's gradient there."""
DEAD_ENCODERS, UNREAD = 64, 56
"""Translators with a dead encoder, and how many of these did not read their source."""


def record_of(kind: str, step: int, steps: int) -> str:
    """The record of a finding at a step of a run, in a sentence: that of the measured moment to which the step is nearest."""
    moment: Moment = "start" if not step else "half" if step < 0.75 * steps else "end"
    own = RECORDS[moment][kind]
    if not own.runs:
        return f"None of {RECORDS[moment]['all'].runs} measured runs {DID[moment]}: what becomes of it is not known."
    return own.sentence(DID[moment])


def faded(step: int, steps: int, share: float) -> tuple[float, Record]:
    """The part of a run that this step is nearest to, and the record of the runs that were below a share of LEVELS there."""
    part = min(FADED, key=lambda part: abs(part - step / steps))
    return part, FADED[part][share]
