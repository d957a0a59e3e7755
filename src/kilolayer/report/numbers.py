"""Formatting of numbers, counts and durations for readers."""

from __future__ import annotations

import math


def show_number(value: float) -> str:
    """Format a number: all digits of a whole number, four digits of another, a dash for NaN or infinity."""
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if value == round(value) else f"{value:,.4g}"


def show_count(value: float) -> str:
    """Format a count: 12345678 as 12.3 M."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def show_duration(seconds: float) -> str:
    """Format a duration in a readable unit."""
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} seconds"
