"""The part of the page about experts: who does the work, said in words and drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kilolayer.report.markup import bullets
from kilolayer.report.panels import Panel, grid, series_of
from kilolayer.report.plots import Series, heat_plot, line_plot
from kilolayer.report.record import Entry, Record, number

IDLE = 0.01  # of an even share: such an expert learns nothing
CROWDED = 0.9  # of the tokens
NAMED = 8
LINES = 6


def experts(record: Record) -> str:
    """Verdict, loads at the end, and how entropy, loads and gradients went; empty in a dense run."""
    entries = [entry for entry in record.routing if _loads(entry)]
    if not entries:
        return ""
    chosen = number(record.config, "model", "moe", "top_k")
    return bullets(_verdict(entries[-1], chosen if math.isfinite(chosen) else 1.0)) + grid(*_panels(entries))


def _verdict(entry: Entry, top_k: float) -> list[str]:
    """What is wrong with each layer at the last line of metrics, or that nothing is."""
    found: list[str] = []
    highest = 0.0
    for layer, load in zip(_layers(entry), _loads(entry), strict=True):
        even, busiest = 1 / len(load), max(range(len(load)), key=load.__getitem__)
        idle = [index + 1 for index, share in enumerate(load) if share < IDLE * even]
        highest = max(highest, load[busiest] / even)
        if top_k < len(load) and load[busiest] * top_k > CROWDED:
            found.append(f"Layer {layer} has collapsed: expert {busiest + 1} takes {load[busiest] * top_k:.0%} of the tokens.")
        if idle:
            names = ", ".join(map(str, idle[:NAMED])) + (" and others" if len(idle) > NAMED else "")
            found.append(f"Layer {layer}: {len(idle)} of {len(load)} experts are dead, with next to no tokens: {names}.")
    step = f"step {int(entry['step']):,}"
    if not found:
        return [f"At {step} every expert works; the busiest has {highest:.1f} times an even share."]
    advice = "Raise model.moe.balance or set model.moe.loss_free, lower train.lr, or lengthen train.warmup_steps."
    return [f"At {step}, of {len(_loads(entry))} layers with experts:", *found, advice]


def _panels(entries: Sequence[Entry]) -> list[Panel]:
    last = entries[-1]
    layers, loads = _layers(last), _loads(last)
    steps = [number(entry, "step") for entry in entries]
    places = sorted({round(index * (len(layers) - 1) / (LINES - 1)) for index in range(LINES)})
    entropy = [Series(layers[place], steps, [_value(entry, "entropy", place) for entry in entries]) for place in places]
    extremes = [
        Series("busiest", steps, [max(max(load) * len(load) for load in _loads(entry)) for entry in entries]),
        Series("idlest", steps, [min(min(load) * len(load) for load in _loads(entry)) for entry in entries]),
    ]
    norms = [series_of("all but experts", entries, "dense_norm"), series_of("experts", entries, "expert_norm")]
    temperature = [Series(layers[place], steps, [_value(entry, "temperature", place) for entry in entries]) for place in places]
    dropped = [Series(layers[place], steps, [_value(entry, "dropped", place) for entry in entries]) for place in places]
    any_dropped = any(value > 0 for each in dropped for value in each.y if math.isfinite(value))
    return [
        Panel(
            heat_plot(
                "loads",
                layers,
                [[share * len(load) for share in load] for load in loads],
                x_label="expert",
                scale_label="times an even share",
                description="Load of each expert in each layer",
            ),
            f"Load by expert, step {int(last['step']):,}",
            "A dark cell is an expert that nobody asks; one bright cell in a dark row is an expert that does it all.",
        ),
        Panel(
            line_plot(
                "expert-extremes",
                extremes,
                x_label="step",
                y_label="times an even share",
                description="Load of the busiest and of the idlest expert of all layers by step",
                from_zero=True,
            ),
            "Busiest and idlest expert",
        ),
        Panel(
            line_plot(
                "routing-entropy",
                entropy,
                x_label="step",
                y_label="nats",
                description="Entropy of the gates by step",
                from_zero=True,
            ),
            "Entropy of the gates",
            f"Between 0, a token asks one expert alone, and {math.log(len(loads[0])):.2f}, it asks all alike.",
        ),
        Panel(
            line_plot(
                "expert-norms",
                norms,
                x_label="step",
                y_label="gradient norm",
                description="Parts of the gradient by step",
                log=True,
            ),
            "Gradient of experts and of all else",
            _clippings(entries),
        ),
        Panel(
            line_plot("temperature", temperature, x_label="step", y_label="temperature", description="Temperature by step"),
            "Temperature of the gates",
        ),
        Panel(
            line_plot("dropped", dropped, x_label="step", y_label="share", description="Dropped choices by step")
            if any_dropped
            else "",
            "Choices over an expert's capacity",
        ),
    ]


def _clippings(entries: Sequence[Entry]) -> str:
    clipped = sum(count for entry in entries if math.isfinite(count := number(entry, "clipped")))
    return f"Clipped in {int(clipped):,} of {int(entries[-1]['step']):,} steps."


def _layers(entry: Entry) -> list[str]:
    return [str(layer) for layer in entry["layers"]]


def _loads(entry: Entry) -> list[list[float]]:
    """The share of each expert by layer; empty where the entry does not hold it."""
    layers, load = entry.get("layers"), entry.get("load")
    if not isinstance(layers, list) or not isinstance(load, list) or len(layers) != len(load) or not load:
        return []
    whole = all(isinstance(row, list) and row and all(isinstance(share, int | float) for share in row) for row in load)
    return load if whole else []


def _value(entry: Entry, key: str, place: int) -> float:
    values = entry.get(key)
    return number({"value": values[place]}, "value") if isinstance(values, list) and place < len(values) else math.nan
