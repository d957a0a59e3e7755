"""Which of several settings is the best: the one rule, for the cells of a table and for verdicts on papers.

The runs of a setting differ in the seed alone. The best setting has the smallest share of runs that died; of equals, the
smallest share of runs without a result, which wait, are under way or have failed, and say nothing against their setting; of
equals, the better mean over the runs that finished.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import TypeVar

from kilolayer.compare.grid import SEED, Setting, same
from kilolayer.compare.outcome import DIED, Kind

Run = TypeVar("Run")


def by_setting(runs: Iterable[Run], options_of: Callable[[Run], Setting]) -> list[tuple[Setting, list[Run]]]:
    """The runs that differ in the seed alone together, with the options that they share, in the order of the runs."""
    groups: list[tuple[Setting, list[Run]]] = []
    for run in runs:
        options = {name: value for name, value in options_of(run).items() if name != SEED}
        own = next((own for shared, own in groups if same(shared, options)), None)
        if own is None:
            groups.append((options, [run]))
        else:
            own.append(run)
    return groups


def rank(kinds: Sequence[Kind], costs: Sequence[float]) -> tuple[float, float, float]:
    """Of the runs of one setting; the smaller, the better.

    kinds: what became of each; costs: what each is chosen by, the smaller the better, NaN where there is no number.
    """
    found = [cost for kind, cost in zip(kinds, costs, strict=True) if kind == "finished" and not math.isnan(cost)]
    died = sum(kind in DIED for kind in kinds)
    return died / len(kinds), (len(kinds) - died - len(found)) / len(kinds), fmean(found) if found else math.inf
