"""Very Deep Transformers, Table 1: the default initialisation and Admin, shallow and deep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kilolayer.report.table import Table
from kilolayer.reproduce.admin_table3 import admin_depths, default_depths
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided

if TYPE_CHECKING:
    from kilolayer.reproduce.lab import Lab


@register
class Table1(Reproduction):
    """6L-6L and 60L-12L with both initialisations: TER and BLEU."""

    name = "admin-table1"
    claim = "60L-12L diverges with the default initialisation; with Admin it is 2.5 BLEU above 6L-6L, and better in TER too."
    setting = (
        "English to French, Tatoeba for WMT-14, dim 128, 2,000 steps, one seed; the runs of admin-table3 and admin-figure2. "
        "METEOR is left out: its program and its tables are not ours to install."
    )
    rule = (
        "Held if the default 60L-12L dies, and Admin's 60L-12L has at least 1 BLEU more and a lower TER than the default "
        "6L-6L. Not held if Admin's 60L-12L dies or is below the default 6L-6L in BLEU. Otherwise it is undecided."
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
        from kilolayer.files.reading import read_json

        found: Found = {}
        for start, runs in (("default", default_depths(lab)), ("Admin", admin_depths(lab))):
            for run in runs:
                layers = str(run["options"]["layers"])
                if layers in ("6-6", "60-12", "1-1", "2-1"):
                    path = Path(run["folder"]) / "scores.json"
                    test: dict[str, Any] = read_json(path).get("test", {}) if path.exists() else {}
                    values = {key: test.get(key, {}).get("value") for key in ("ter", "bleu")}
                    found[f"{layers} {start}"] = {"outcome": run["outcome"], "text": run["text"], **values}
        return found

    def judge(self, found: Found) -> Verdict:
        from kilolayer.reproduce.cells import died, ended

        shallow, deep_plain, _, deep = found.values()
        why = f"default, shallow: {_shown(shallow)}; default, deep: {_shown(deep_plain)}; Admin, deep: {_shown(deep)}"
        if died(deep):
            return not_held(why)
        if not all(ended(each) and None not in (each["bleu"], each["ter"]) for each in (shallow, deep)):
            return undecided(why)
        if deep["bleu"] < shallow["bleu"]:
            return not_held(why)
        gains = deep["bleu"] >= shallow["bleu"] + 1 and deep["ter"] < shallow["ter"]
        return held(why) if died(deep_plain) and gains else undecided(why)

    def numbers(self, found: Found) -> Table:
        rows = [
            [name, *(each["text"] if each[key] is None else f"{each[key]:.1f}" for key in ("ter", "bleu"))]
            for name, each in found.items()
        ]
        return Table(["", "TER", "BLEU"], rows)


def _shown(each: dict[str, Any]) -> str:
    return each["text"] if each["bleu"] is None else f"BLEU {each['bleu']:.1f}"
