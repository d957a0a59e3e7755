"""Colours and dashes that distinguish the values of an axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kilolayer.report.comparison_view import Value
from kilolayer.report.figure import PALETTE, shades

COLOURS = (*PALETTE, "#882255", "#6b6b6b", "#117733", "#332288")  # beyond Okabe and Ito's, four of Tol's that are as far apart
LIGHTEST = 0.75  # of viridis, as a thin line on white
DASHES: tuple[tuple[int, ...], ...] = ((), (6, 3), (2, 2), (8, 3, 2, 3))
ORDERED_DASHES: tuple[tuple[int, ...], ...] = ((), (12, 3), (7, 3), (7, 3, 2, 3), (4, 3), (2, 3))
"""From solid to dotted, for values in order: the deeper, the more solid."""
LINE = "#767676"  # of a line in a legend that shows only its dash: as far from white as from black


@dataclass(frozen=True)
class Appearance:
    """How one value is drawn. dash: alternating lengths of line and gap in pixels; empty for a solid line."""

    label: str
    colour: str
    dash: tuple[int, ...] = ()


def appearances(values: Sequence[Value]) -> list[Appearance]:
    """One appearance per value: numbers from dark to light in increasing order; names in distinct colours, then line styles."""
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) == len(values) and len(values) > 2:
        order = sorted(set(numbers))
        by_size = dict(zip(order, shades(len(order), LIGHTEST), strict=True))
        return [Appearance(show_value(value), by_size[value]) for value in numbers]
    return [
        Appearance(show_value(value), COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)])
        for index, value in enumerate(values)
    ]


def dashes(values: Sequence[Value]) -> list[tuple[int, ...]]:
    """One dash per value, for lines whose colour means something else: the largest, or the last of names, is solid."""
    numbers = [value for value in values if isinstance(value, int | float)]
    order: list[Value] = [*sorted(numbers)] if len(numbers) == len(values) else [*values]
    apart = max((len(ORDERED_DASHES) - 1) // max(len(order) - 1, 1), 1)
    return [ORDERED_DASHES[apart * (len(order) - 1 - order.index(value)) % len(ORDERED_DASHES)] for value in values]


def show_value(value: Value) -> str:
    """An option's value as it is written in a configuration."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
