"""Very Deep Transformers, Figure 2: learning curves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kilolayer.report.table import Table
from kilolayer.reproduce.admin_table3 import admin_depths, default_depths
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided

if TYPE_CHECKING:
    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.lab import Lab, Run


@register
class Figure2(Reproduction):
    """Training perplexity of 60L-12L with both initialisations, and validation perplexity of Admin at all depths."""

    name = "admin-figure2"
    claim = (
        "60L-12L does not learn with the default initialisation, but does with Admin; deeper Admin models reach lower "
        "validation perplexity."
    )
    setting = "The runs of admin-table3, and Post-LN at 6L-6L and 60L-12L: English to French, dim 128, 2,000 steps, one seed."
    rule = (
        "Held if the default 60L-12L dies or ends at a validation loss at least 0.5 nats above Admin's, and Admin's "
        "60L-12L ends below Admin's 6L-6L. Not held if the default 60L-12L ends at or below Admin's, or Admin's 60L-12L "
        "dies. Otherwise it is undecided."
    )

    def measure(self, lab: Lab) -> Found:
        return {"admin": admin_depths(lab), "default": default_depths(lab)}

    def judge(self, found: Found) -> Verdict:
        from kilolayer.reproduce.cells import died

        admin, default = _by_depth(found["admin"]), _by_depth(found["default"])
        deep = list(default)[-1]
        ours, plain, shallow = admin[deep], default[deep], next(iter(admin.values()))
        why = f"at {deep}: default {_shown(plain)}, Admin {_shown(ours)}; Admin at {next(iter(admin))}: {_shown(shallow)}"
        if died(ours):
            return not_held(why)
        if not _lives(ours) or not (died(plain) or _lives(plain)):
            return undecided(why)
        if _lives(plain) and plain["loss"] <= ours["loss"]:
            return not_held(why)
        worse = died(plain) or plain["loss"] >= ours["loss"] + 0.5
        return held(why) if worse and _lives(shallow) and ours["loss"] < shallow["loss"] else undecided(why)

    def numbers(self, found: Found) -> Table:
        rows = [
            [f"{start} {depth}", _shown(run)]
            for start in ("default", "admin")
            for depth, run in _by_depth(found[start]).items()
        ]
        return Table(["", "validation perplexity"], rows)

    def panels(self, found: Found) -> list[Panel]:
        from kilolayer.reproduce.pictures import curves

        admin, default = _by_depth(found["admin"]), _by_depth(found["default"])
        deep = list(default)[-1]
        both = {f"default {deep}": default[deep], f"Admin {deep}": admin[deep]}
        return [curves(both, "train", f"Training loss at {deep}"), curves(admin, "valid", "Validation loss of Admin by depth")]


def _by_depth(runs: list[Run]) -> dict[str, Run]:
    return {str(run["options"]["layers"]): run for run in runs}


def _lives(run: Run) -> bool:
    return run["outcome"] == "finished" and run["loss"] is not None


def _shown(run: Run) -> str:
    return f"{math.exp(run['loss']):.2f}" if _lives(run) else run["text"]
