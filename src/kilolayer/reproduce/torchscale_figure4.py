"""TorchScale, Figure 4: the routing's entropy, and how often gradients are clipped."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided
from kilolayer.reproduce.torchscale_figure3 import clippings

if TYPE_CHECKING:
    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.lab import Lab, Run

APART = 0.02
"""Relative difference of the entropy below which two values count as equal."""


@register
class Figure4(Reproduction):
    """The runs of Figure 3 with the largest number of experts."""

    name = "torchscale-figure4"
    claim = "SparseClip lowers the entropy of the routing, and clipping is triggered at the beginning of training alone."
    setting = "The runs of torchscale-figure3 with 256 experts, means of two seeds."
    rule = (
        "Held if the entropy over the last fifth of the training is lower with SparseClip by more than 2%, and with "
        "SparseClip at least 80% of the clipped steps lie in the first fifth. Not held if the entropy is higher by more "
        "than 2%, or fewer than 20% of the clipped steps lie there. Otherwise it is undecided."
    )

    def measure(self, lab: Lab) -> Found:
        from kilolayer.report.record import read_record
        from kilolayer.reproduce.cells import ended

        found: Found = {}
        runs = clippings(lab)["sparse"]
        most = max(run["options"]["model.moe.experts"] for run in runs)
        for clip in ("plain", "sparse"):
            own: list[Run] = [
                run for run in runs if (run["options"]["model.moe.experts"], run["options"]["train.clip"]) == (most, clip)
            ]
            records = [read_record(Path(run["folder"])) for run in own if ended(run)]
            found[clip] = {
                "outcomes": [run["outcome"] for run in own],
                "entropy": [[(row["step"], fmean(row["entropy"])) for row in record.routing] for record in records],
                "clipped": [[(row["step"], row["clipped"]) for row in record.train] for record in records],
            }
        return found

    def judge(self, found: Found) -> Verdict:
        if any(outcome != "finished" for clip in ("plain", "sparse") for outcome in found[clip]["outcomes"]):
            return undecided("some run did not finish")
        plain, sparse = (self._entropy(found, clip) for clip in ("plain", "sparse"))
        early = self._early(found, "sparse")
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
        for clip in ("plain", "sparse"):
            entropy, early = self._entropy(found, clip), self._early(found, clip)
            count = sum(number for rows in found[clip]["clipped"] for _, number in rows)
            cells = ["-" if entropy is None else f"{entropy:.3f}", f"{count:,}", "-" if early is None else f"{early:.0%}"]
            rows.append([clip, *cells])
        return Table(["clipping", "entropy, last fifth", "clipped steps", "of these in the first fifth"], rows)

    def panels(self, found: Found) -> list[Panel]:
        from kilolayer.reproduce.pictures import lines

        entropy = {clip: found[clip]["entropy"][0] for clip in ("plain", "sparse") if found[clip]["entropy"]}
        clipped = {clip: found[clip]["clipped"][0] for clip in ("plain", "sparse") if found[clip]["clipped"]}
        return [
            lines(entropy, "Entropy of the routing", "step", "entropy, nats"),
            lines(clipped, "Clipped steps", "step", "since the last line of metrics"),
        ]

    def _entropy(self, found: Found, clip: str) -> float | None:
        """The mean entropy over the last fifth of training and over all seeds."""
        rows = [row for run in found[clip]["entropy"] for row in run[-max(1, len(run) // 5) :]]
        return fmean(value for _, value in rows) if rows else None

    def _early(self, found: Found, clip: str) -> float | None:
        """The share of clipped steps that fall into the first fifth of training."""
        rows = [(step <= run[-1][0] / 5, count) for run in found[clip]["clipped"] for step, count in run]
        total = sum(count for _, count in rows)
        return sum(count for is_early, count in rows if is_early) / total if total else None
