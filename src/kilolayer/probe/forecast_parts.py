"""What is printed about a forecast."""

from __future__ import annotations

from kilolayer.display import Line, Part
from kilolayer.probe.forecast import Forecast


def parts_of(found: Forecast) -> list[Part]:
    """What `kilolayer forecast` prints."""
    own = f"{'should live' if found.lives else 'is likely to fail'}: the probability that it breaks is {found.breaks:.0%}"
    largest = "none that was tried" if found.largest_lr is None else f"{found.largest_lr:g}"
    shortest = "none that fits the run" if found.shortest_warmup is None else f"{found.shortest_warmup:,} steps"
    return [
        Line(f"The configuration, learning rate {found.lr:g} after {found.warmup:,} steps of warm-up, {own}."),
        Line(f"Largest learning rate with this warm-up: {largest}."),
        Line(f"Shortest warm-up for this learning rate: {shortest}."),
        Line(f"Why: {found.why}."),
        Line(f"How sure: {found.sure}."),
    ]
