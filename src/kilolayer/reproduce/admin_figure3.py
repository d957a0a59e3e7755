"""Very Deep Transformers, Figure 3: where the deep model is better."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from kilolayer.report.table import Table
from kilolayer.reproduce.admin_table3 import SETTING, admin_depths, default_depths
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided
from kilolayer.reproduce.stored_run import has, keep, scores_of

if TYPE_CHECKING:
    from pathlib import Path

    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.lab import Lab

BUCKETS = {"frequency_buckets": ("words seen", "f1", 100.0), "length_buckets": ("length", "bleu", 1.0)}


@register
class Figure3(Reproduction):
    """Word accuracy by frequency, and BLEU by sentence length."""

    name = "admin-figure3"
    claim = "The deep model is better across the board: for rare and frequent words, and for short and long sentences."
    setting = (
        f"Post-LN at 6L-6L beside Admin at 60L-12L, the runs of admin-figure2: {SETTING}; scores on 500 sentences, means of "
        "the seeds."
    )
    rule = (
        "Of all buckets that have a score in every seed of both, the deep model is better in at least 80%: held. In at most "
        "50%: not held. Otherwise it is undecided."
    )

    def measure(self, lab: Lab) -> Found:
        shallow, deep = ("1-1", "2-1") if lab.tiny else ("6-6", "60-12")
        found = {
            "shallow": [run for run in default_depths(lab) if has(run, {"layers": shallow})],
            "deep": [run for run in admin_depths(lab) if has(run, {"layers": deep})],
        }
        for runs in found.values():
            for run in runs:
                keep(run, "buckets", _buckets)
        return found

    def judge(self, found: Found) -> Verdict:
        pairs = [(shallow, deep) for _, shallow, deep in _pairs(found)]
        if not pairs:
            return undecided("; ".join(f"{name}: {runs[0]['text']}" for name, runs in found.items()))
        better = sum(deep > shallow for shallow, deep in pairs)
        why = f"the deep model is better in {better} of {len(pairs)} buckets"
        if better >= 0.8 * len(pairs):
            return held(why)
        return not_held(why) if better <= 0.5 * len(pairs) else undecided(why)

    def numbers(self, found: Found) -> Table:
        return Table(["bucket", "6L-6L", "60L-12L"], [[name, f"{a:.1f}", f"{b:.1f}"] for name, a, b in _pairs(found)])

    def panels(self, found: Found) -> list[Panel]:
        from kilolayer.report.bars import grouped_bar_plot
        from kilolayer.report.panel import Panel

        names, shallow, deep = zip(*_pairs(found), strict=True) if _pairs(found) else ((), (), ())
        groups = {"6L-6L": shallow, "60L-12L": deep}
        texts = {"x_label": "bucket", "y_label": "F1 in percent, or BLEU", "description": "Score by bucket"}
        return [Panel(grouped_bar_plot("buckets", names, groups, **texts), "Score by bucket")]


def _buckets(folder: Path) -> dict[str, float | None]:
    """The score of each bucket by its name."""
    scores = scores_of(folder)
    return {
        f"{title} {bucket['label']}": None if bucket[key] is None else factor * bucket[key]
        for kind, (title, key, factor) in BUCKETS.items()
        for bucket in scores.get(kind, ())
    }


def _pairs(found: Found) -> list[tuple[str, float, float]]:
    """The buckets that have a score in every seed of both models, with their means over the seeds."""
    shallow, deep = ([run["buckets"] or {} for run in found[name]] for name in ("shallow", "deep"))
    names = [name for name in shallow[0] if all(seed.get(name) is not None for seed in (*shallow, *deep))]
    return [(name, fmean(seed[name] for seed in shallow), fmean(seed[name] for seed in deep)) for name in names]
