"""Very Deep Transformers, Figure 3: where the deep model is better."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kilolayer.report.table import Table
from kilolayer.reproduce.admin_table3 import admin_depths, default_depths
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided

if TYPE_CHECKING:
    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.lab import Lab

BUCKETS = {"frequency_buckets": ("f1", 100.0), "length_buckets": ("bleu", 1.0)}


@register
class Figure3(Reproduction):
    """Word accuracy by frequency, and BLEU by sentence length."""

    name = "admin-figure3"
    claim = "The deep model is better across the board: for rare and frequent words, and for short and long sentences."
    setting = (
        "English to French: Post-LN at 6L-6L beside Admin at 60L-12L, of admin-table3 and admin-figure2, on 500 sentences."
    )
    rule = (
        "Of all buckets that hold at least one item in both, the deep model is better in at least 80%: held. In at most "
        "50%: not held. Otherwise it is undecided."
    )

    def measure(self, lab: Lab) -> Found:
        from kilolayer.files.reading import read_json

        deep = "2-1" if lab.tiny else "60-12"
        chosen = {"shallow": default_depths(lab)[0]}
        chosen["deep"] = next(run for run in admin_depths(lab) if str(run["options"]["layers"]) == deep)
        found: Found = {}
        for name, run in chosen.items():
            path = Path(run["folder"]) / "scores.json"
            scores = read_json(path) if path.exists() else {}
            found[name] = {"text": run["text"], **{key: scores.get(key, []) for key in BUCKETS}}
        return found

    def judge(self, found: Found) -> Verdict:
        pairs = [(shallow, deep) for _, shallow, deep in _pairs(found)]
        if not pairs:
            return undecided(f"shallow: {found['shallow']['text']}; deep: {found['deep']['text']}")
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


def _pairs(found: Found) -> list[tuple[str, float, float]]:
    """The buckets that have a score for both models."""
    rows: list[tuple[str, float, float]] = []
    for kind, (key, factor) in BUCKETS.items():
        other: dict[str, Any] = {bucket["label"]: bucket[key] for bucket in found["deep"][kind]}
        for bucket in found["shallow"][kind]:
            if bucket[key] is not None and other.get(bucket["label"]) is not None:
                name = f"{'words seen' if key == 'f1' else 'length'} {bucket['label']}"
                rows.append((name, factor * bucket[key], factor * other[bucket["label"]]))
    return rows
