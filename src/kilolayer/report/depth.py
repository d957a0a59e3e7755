"""The section about depth: what reaches the first layers, and norms by layer and step, as plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kilolayer.recipes.base import DEEPEST
from kilolayer.report.figure import Series
from kilolayer.report.layer_plots import layers_by_step_plot
from kilolayer.report.panel import Ends, Panel, chart_panel
from kilolayer.report.panels import coloured
from kilolayer.report.record import Entry, Record, number
from kilolayer.report.stacks_panel import stacks_panel, troughs

SIDES = ("encoder", "decoder")
QUANTITIES = {
    "gradient": ("Gradient norm", "The norm of the gradient of each layer's weights."),
    "update": ("Update norm", "The norm of the change in each layer's weights in one step."),
    "residual": ("Residual stream RMS", "The root mean square of each layer's output."),
    "attention_logit": (
        "Largest attention logit",
        "The largest number that enters the softmax of each layer's self-attention.",
    ),
    "cross_attention_logit": (
        "Largest cross-attention logit",
        "The largest number that enters the softmax of each layer's cross-attention.",
    ),
}


@dataclass(frozen=True)
class DepthSection:
    """findings: sentences about a single run. profiles: plots of norms over depth. pictures: heat maps by layer and step."""

    findings: list[str]
    profiles: list[Panel]
    pictures: list[Panel]


def depth_section(records: Sequence[Record], ends: Ends | None = None) -> DepthSection:
    """Plot every quantity in every stack over depth: for one run at a few steps, for several runs at the last measurement.

    Heat maps are added for a single run with at least two measurements. ends: the range of steps that they and the plot of what
    reaches the first layers show.
    """
    entries = records[0].layers if len(records) == 1 else []
    profiles = [_profile(records, quantity, side) for side in SIDES for quantity in QUANTITIES]
    profiles = [stacks_panel(records, ends), *profiles]
    pictures = [_picture(entries, quantity, ends) for quantity in QUANTITIES] if len(entries) > 1 else []
    findings = troughs(records[0]) if len(records) == 1 else []
    return DepthSection(findings, [panel for panel in profiles if panel.svg], [panel for panel in pictures if panel.svg])


def _picture(entries: Sequence[Entry], quantity: str, ends: Ends | None) -> Panel:
    title, note = QUANTITIES[quantity]
    stacks = {side: [_norms(entry, quantity, side) for entry in entries] for side in SIDES}
    svg = layers_by_step_plot(
        f"{quantity}-by-step",
        [number(entry, "step") for entry in entries],
        {side: columns for side, columns in stacks.items() if any(columns)},
        scale_label=title.lower().replace("rms", "RMS"),
        description=f"{title} by layer and step",
        ends=ends,
    )
    return Panel(svg, f"{title} by layer and step", note)


def _profile(records: Sequence[Record], quantity: str, side: str) -> Panel:
    title, note = QUANTITIES[quantity]
    if len(records) == 1:
        series = [
            _over_depth(f"step {int(entry['step']):,}", entry, quantity, side) for entry in _at_most_five(records[0].layers)
        ]
    else:
        series = [
            replace(_over_depth(record.name, record.layers[-1], quantity, side), colour=colour)
            for record, colour in coloured(records)
            if record.layers
        ]
    measured = [entry for record in records for entry in record.layers]
    deepest = max((len(_norms(entry, quantity, each)) for entry in measured for each in SIDES), default=1)
    return chart_panel(
        f"{quantity}-{side}",
        f"{title}, {side}",
        series,
        x_label="layer",
        y_label=title.lower().replace("rms", "RMS"),
        description=f"{title} by layer of the {side}",
        note=note,
        log=True,
        ordered=len(records) == 1,
        ends=(1.0, float(deepest)),
    )


def _at_most_five(entries: Sequence[Entry]) -> list[Entry]:
    """At most five entries, including the first and the last."""
    indices = sorted({round(index * (len(entries) - 1) / 4) for index in range(5)}) if entries else []
    return [entries[number] for number in indices]


def _over_depth(name: str, entry: Entry, quantity: str, side: str) -> Series:
    norms = _norms(entry, quantity, side)
    return Series(name, range(1, len(norms) + 1), norms)


def _norms(entry: Entry, quantity: str, side: str) -> list[float]:
    """The norm of each layer, NaN if there is no number; empty if nothing was measured."""
    stacks = entry.get(quantity)
    norms = stacks.get(side) if isinstance(stacks, dict) else None
    return [number({"norm": norm}, "norm") for norm in norms[:DEEPEST]] if isinstance(norms, list) else []
