"""Very Deep Transformers, Table 1: the default initialization and Admin, shallow and deep."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from kilolayer.report.table import Table
from kilolayer.reproduce.admin_table3 import SETTING, admin_depths, default_depths
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided
from kilolayer.reproduce.cells import named_cells
from kilolayer.reproduce.stored_run import Run, keep, scores_of

if TYPE_CHECKING:
    from pathlib import Path

    from kilolayer.reproduce.lab import Lab


@register
class Table1(Reproduction):
    """6L-6L and 60L-12L with both initializations: TER and BLEU."""

    name = "admin-table1"
    claim = "60L-12L diverges with the default initialization; with Admin it is 2.5 BLEU above 6L-6L, and better in TER too."
    setting = (
        f"The runs of admin-figure2: {SETTING}. METEOR is left out, because its French module needs paraphrase tables that are "
        "not freely installable."
    )
    rule = (
        "A model dies if one of its seeds does; else the means of its seeds' scores count. Held if the default 60L-12L dies, "
        "and Admin's 60L-12L has at least 1 BLEU more and a lower TER than the default 6L-6L. Not held if Admin's 60L-12L dies "
        "or is below the default 6L-6L in BLEU. Otherwise it is undecided."
    )
    published = Table(
        ["WMT-14 En-Fr", "TER", "METEOR", "BLEU"],
        [
            ["6L-6L default", "42.2", "60.5", "41.3"],
            ["6L-6L Admin", "41.8", "60.7", "41.5"],
            ["60L-12L default", "diverge", "diverge", "diverge"],
            ["60L-12L Admin", "40.3", "62.4", "43.8"],
        ],
    )

    def measure(self, lab: Lab) -> Found:
        ends = ("1-1", "2-1") if lab.tiny else ("6-6", "60-12")
        found: Found = {}
        for start, runs in (("default", default_depths(lab)), ("Admin", admin_depths(lab))):
            for layers in ends:
                own = found[f"{layers} {start}"] = [run for run in runs if run["options"]["layers"] == layers]
                for run in own:
                    keep(run, "ter", _ter)
        return found

    def judge(self, found: Found) -> Verdict:
        shallow, _, _, deep = (_means(runs) for runs in found.values())
        _, plain_cell, _, deep_cell = named_cells(found).values()
        why = "; ".join(f"{name}: TER {ter}, BLEU {bleu}" for name, ter, bleu in self.numbers(found).rows)
        if deep_cell.died:
            return not_held(why)
        if shallow is None or deep is None:
            return undecided(why)
        if deep[1] < shallow[1]:
            return not_held(why)
        gains = deep[1] >= shallow[1] + 1 and deep[0] < shallow[0]
        return held(why) if plain_cell.died and gains else undecided(why)

    def numbers(self, found: Found) -> Table:
        rows: list[list[str]] = []
        for name, cell in named_cells(found).items():
            means = _means(found[name])
            rows.append([name, *([cell.text or "-"] * 2 if means is None else [f"{mean:.1f}" for mean in means])])
        return Table(["", "TER", "BLEU"], rows)


def _ter(folder: Path) -> float | None:
    return scores_of(folder).get("test", {}).get("ter", {}).get("value")


def _means(runs: list[Run]) -> tuple[float, float] | None:
    """TER and BLEU, averaged over the seeds; None if a run has not ended, has died or has no scores."""
    if not all(run["outcome"] == "finished" and None not in (run["ter"], run["bleu"]) for run in runs):
        return None
    return fmean(run["ter"] for run in runs), fmean(run["bleu"] for run in runs)
