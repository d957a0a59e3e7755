"""The part of the page about depth: how far the gradient reaches, said in words, and the norms of each layer, drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kilolayer.report.panels import Panel, grid
from kilolayer.report.plots import Series, line_plot
from kilolayer.report.record import Entry, number

SIDES = ("encoder", "decoder")
QUANTITIES = {
    "gradient": ("Gradient norm", "How strongly the loss pulls on each layer's weights."),
    "update": ("Update norm", "How far a step moved each layer's weights."),
    "residual": ("Residual stream norm", "The root mean square of what each layer hands to the next."),
}
REACHED = 0.01  # of the largest gradient in a stack: with less, a layer does not learn


def unreached(entries: Sequence[Entry]) -> list[str]:
    """For each stack whose layers the gradient did not all reach when it was last measured: where, and what to do."""
    found: list[str] = []
    for side in SIDES:
        measured = [entry for entry in entries if any(_gradient(entry, side).values())]
        if not measured or not (missed := _missed(measured[-1], side)):
            continue
        (first, last), norms = (f"step {int(measured[place]['step']):,}" for place in (0, -1)), _gradient(measured[-1], side)
        least, most = min(norms, key=norms.__getitem__), max(norms, key=norms.__getitem__)
        found.append(
            f"At {last} the gradient does not reach {missed} of the {len(norms)} layers of the {side}: "
            f"layer {least} has {norms[least]:.1e}, layer {most} {norms[most]:.1e}."
        )
        if side == "encoder" and _gradient(measured[-1], "decoder"):
            found.append(
                "A decoder beside such an encoder does not read the source: the loss that falls is a language model's."
            )
        if _missed(measured[0], side):
            found.append(f"Nor did it at {first}: choose a recipe for this depth, such as deepnorm.")
        else:
            found.append(
                f"At {first} it reached all: begin anew with a lower train.lr, more train.warmup_steps, or train.eps = 1e-4."
            )
    return found


def layers(entries: Sequence[Entry]) -> str:
    """Each quantity over depth at up to five steps from first to last, for each stack."""
    places = sorted({round(index * (len(entries) - 1) / 4) for index in range(5)}) if entries else []
    panels: list[Panel] = []
    for side in SIDES:
        for quantity, (title, note) in QUANTITIES.items():
            svg = line_plot(
                f"{quantity}-{side}",
                [_over_depth(entries[place], quantity, side) for place in places],
                x_label="layer",
                y_label=title.lower(),
                description=f"{title} by layer of the {side}",
                log=True,
                ordered=True,
            )
            panels.append(Panel(svg, f"{title}, {side}", note))
    return grid(*panels)


def _missed(entry: Entry, side: str) -> int:
    """Layers with too little gradient."""
    norms = _gradient(entry, side).values()
    return sum(norm < REACHED * max(norms) for norm in norms)


def _gradient(entry: Entry, side: str) -> dict[int, float]:
    """Its norm by layer, counted from 1, where it is a number."""
    return {layer: norm for layer, norm in enumerate(_norms(entry, "gradient", side), 1) if math.isfinite(norm)}


def _over_depth(entry: Entry, quantity: str, side: str) -> Series:
    norms = _norms(entry, quantity, side)
    return Series(f"step {int(entry['step']):,}", range(1, len(norms) + 1), norms)


def _norms(entry: Entry, quantity: str, side: str) -> list[float]:
    """Of each layer, NaN where there is no number; empty where nothing was measured."""
    stacks = entry.get(quantity)
    norms = stacks.get(side) if isinstance(stacks, dict) else None
    return [number({"norm": norm}, "norm") for norm in norms] if isinstance(norms, list) else []
