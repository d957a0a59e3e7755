"""Very Deep Transformers, Figure 2: learning curves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kilolayer.report.table import Table
from kilolayer.reproduce.admin_table3 import SETTING, admin_depths, default_depths
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided
from kilolayer.reproduce.cells import Cell, cells_by

if TYPE_CHECKING:
    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.lab import Lab


@register
class Figure2(Reproduction):
    """Training perplexity of 60L-12L with both initializations, and validation perplexity of Admin at all depths."""

    name = "admin-figure2"
    claim = (
        "60L-12L does not learn with the default initialization, but does with Admin; deeper Admin models reach lower "
        "validation perplexity."
    )
    setting = f"The runs of admin-table3, and Post-LN at 6L-6L and 60L-12L: {SETTING}."
    rule = (
        "A model dies if one of its seeds does; else the mean of its seeds' validation losses counts. Held if the default "
        "60L-12L dies or is at least 0.5 nats above Admin's, and Admin's 60L-12L is below Admin's 6L-6L. Not held if the "
        "default 60L-12L is at or below Admin's, or Admin's 60L-12L dies. Otherwise it is undecided."
    )

    def measure(self, lab: Lab) -> Found:
        return {"admin": admin_depths(lab), "default": default_depths(lab)}

    def judge(self, found: Found) -> Verdict:
        admin, default = (cells_by(found[start], "layers") for start in ("admin", "default"))
        deep = list(default)[-1]
        ours, plain, shallow = admin[deep], default[deep], next(iter(admin.values()))
        why = f"at {deep}: default {_shown(plain)}, Admin {_shown(ours)}; Admin at {next(iter(admin))}: {_shown(shallow)}"
        if ours.died:
            return not_held(why)
        if not ours.lives or not (plain.died or plain.lives):
            return undecided(why)
        if plain.lives and plain.loss <= ours.loss:
            return not_held(why)
        worse = plain.died or plain.loss >= ours.loss + 0.5
        return held(why) if worse and shallow.lives and ours.loss < shallow.loss else undecided(why)

    def numbers(self, found: Found) -> Table:
        rows = [
            [f"{start} {depth}", _shown(cell)]
            for start in ("default", "admin")
            for depth, cell in cells_by(found[start], "layers").items()
        ]
        return Table(["", "on the validation set"], rows)

    def panels(self, found: Found) -> list[Panel]:
        from kilolayer.reproduce.pictures import curves, first_by

        admin, default = (first_by(found[start], "layers") for start in ("admin", "default"))
        deep = list(default)[-1]
        both = {f"default {deep}": default[deep], f"Admin {deep}": admin[deep]}
        return [curves(both, "train", f"Training loss at {deep}"), curves(admin, "valid", "Validation loss of Admin by depth")]


def _shown(cell: Cell) -> str:
    return f"perplexity {math.exp(cell.loss):.2f}" if math.isfinite(cell.loss) else cell.text
