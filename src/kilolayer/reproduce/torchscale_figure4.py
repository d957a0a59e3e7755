"""TorchScale, Figure 4: the routing's entropy, and how often gradients are clipped."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided
from kilolayer.reproduce.stored_run import Run, ended, keep
from kilolayer.reproduce.torchscale_figure3 import CONDITION, cells_of_clippings, clippings, no_gain

if TYPE_CHECKING:
    from pathlib import Path

    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.lab import Lab

CLIPS = ("plain", "sparse")
APART = 0.02
"""Relative difference of the entropy below which two values count as equal."""


@register
class Figure4(Reproduction):
    """The runs of Figure 3 with the largest number of experts."""

    name = "torchscale-figure4"
    claim = "SparseClip lowers the entropy of the routing, and clipping is triggered at the beginning of training alone."
    setting = "The runs of torchscale-figure3 with 256 experts, means of two seeds."
    rule = (
        f"As in torchscale-figure3, {CONDITION} Else held if the entropy over the last fifth of the training is lower with "
        "SparseClip by more than 2%, and with SparseClip at least 80% of the clipped steps lie in the first fifth. Not held if "
        "the entropy is higher by more than 2%, or fewer than 20% of the clipped steps lie there. Otherwise it is undecided."
    )

    def measure(self, lab: Lab) -> Found:
        found = clippings(lab)
        for clip in CLIPS:
            for run in _largest(found, clip):
                keep(run, "routing", _routing)
        return found

    def judge(self, found: Found) -> Verdict:
        if reason := no_gain(cells_of_clippings(found)):
            return undecided(reason)
        if any(run["outcome"] != "finished" for clip in CLIPS for run in _largest(found, clip)):
            return undecided("some run did not finish")
        plain, sparse = (_entropy(found, clip) for clip in CLIPS)
        early = _early(found, "sparse")
        if plain is None or sparse is None or early is None:
            return undecided("a run left no routing, or nothing was clipped")
        change = (sparse - plain) / plain
        why = (
            f"entropy {sparse:.3f} with SparseClip and {plain:.3f} without; {early:.0%} of its clipped steps in the first fifth"
        )
        if change < -APART and early >= 0.8:
            return held(why)
        return not_held(why) if change > APART or early < 0.2 else undecided(why)

    def numbers(self, found: Found) -> Table:
        rows = []
        for clip in CLIPS:
            entropy, early = _entropy(found, clip), _early(found, clip)
            count = sum(number for rows in _rows(found, clip, "clipped") for _, number in rows)
            cells = ["-" if entropy is None else f"{entropy:.3f}", f"{count:,}", "-" if early is None else f"{early:.0%}"]
            rows.append([clip, *cells])
        return Table(["clipping", "entropy, last fifth", "clipped steps", "of these in the first fifth"], rows)

    def panels(self, found: Found) -> list[Panel]:
        from kilolayer.reproduce.pictures import lines

        entropy, clipped = (
            {clip: rows[0] for clip in CLIPS if (rows := _rows(found, clip, key))} for key in ("entropy", "clipped")
        )
        return [
            lines(entropy, "Entropy of the routing", "step", "entropy, nats"),
            lines(clipped, "Clipped steps", "step", "since the last line of metrics"),
        ]


def _routing(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """By step, the mean entropy of the routing, and how many steps were clipped since the last row."""
    from kilolayer.report.record import read_record

    record = read_record(folder)
    return {
        "entropy": [(row["step"], fmean(row["entropy"])) for row in record.routing],
        "clipped": [(row["step"], row["clipped"]) for row in record.train],
    }


def _largest(found: Found, clip: str) -> list[Run]:
    """The runs with the most experts and this kind of clipping."""
    most = max(run["options"]["model.moe.experts"] for run in found["sparse"])
    return [
        run for run in found["sparse"] if (run["options"]["model.moe.experts"], run["options"]["train.clip"]) == (most, clip)
    ]


def _rows(found: Found, clip: str, key: str) -> list[list[tuple[int, float]]]:
    """What was kept of each run that has ended."""
    return [run["routing"][key] for run in _largest(found, clip) if ended(run) and run["routing"]]


def _entropy(found: Found, clip: str) -> float | None:
    """The mean entropy over the last fifth of training and over all seeds."""
    rows = [row for run in _rows(found, clip, "entropy") for row in run[-max(1, len(run) // 5) :]]
    return fmean(value for _, value in rows) if rows else None


def _early(found: Found, clip: str) -> float | None:
    """The share of clipped steps that fall into the first fifth of training."""
    rows = [(step <= run[-1][0] / 5, count) for run in _rows(found, clip, "clipped") for step, count in run]
    total = sum(count for _, count in rows)
    return sum(count for is_early, count in rows if is_early) / total if total else None
