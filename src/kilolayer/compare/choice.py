"""Which of several settings is the best: one rule, used for the cells of a table and for the verdicts on papers.

The runs of a setting differ only in the seed. The best setting has the smallest fraction of runs that died. Ties are broken by
the fraction of runs without a result (waiting, under way or failed), which say nothing against their setting, and then by the
mean over the runs that finished.
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
    """Group the runs that differ only in the seed, with the options that they share, in the order of the runs."""
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
    """The sort key of a setting, from its runs; smaller is better.

    kinds: the outcome of each run. costs: the value that each is chosen by, smaller is better; NaN if there is none.
    """
    found = [cost for kind, cost in zip(kinds, costs, strict=True) if kind == "finished" and not math.isnan(cost)]
    died = sum(kind in DIED for kind in kinds)
    return died / len(kinds), (len(kinds) - died - len(found)) / len(kinds), fmean(found) if found else math.inf
