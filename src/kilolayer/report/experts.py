"""The part of the page about experts: who does the work, said in words and drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kilolayer.report.markup import bullets
from kilolayer.report.panels import Panel, grid, series_of
from kilolayer.report.plots import Series, heat_plot, line_plot
from kilolayer.report.record import Entry, Record, number

IDLE = 0.01  # of an even share: such an expert learns nothing
ENOUGH = 100  # choices an expert, if shared evenly: with fewer, chance alone leaves some without any
CROWDED = 0.9  # of the tokens
NAMED = 8
LINES = 6


def experts(record: Record) -> str:
    """Verdict, loads at the end, and how entropy, loads and gradients went; empty in a dense run."""
    if not (entries := _told(record)):
        return ""
    lately = _lately(entries, _top_k(record))
    verdict = unbalanced(record) or [_sound(lately, int(entries[-1]["step"]))]
    return bullets(verdict) + grid(*_panels(entries, lately))


def unbalanced(record: Record) -> list[str]:
    """What is wrong with the experts of each layer, and what to do; empty where nothing is."""
    if not (entries := _told(record)):
        return []
    top_k = _top_k(record)
    lately = _lately(entries, top_k)
    faults = [fault for each in lately for fault in _faults(each, top_k)]
    if not faults:
        return []
    count = f"{len(lately)} layers" if len(lately) > 1 else "1 layer"
    advice = "Raise model.moe.balance or set model.moe.loss_free, lower train.lr, or lengthen train.warmup_steps."
    return [f"At step {int(entries[-1]['step']):,}, of {count} with experts:", *faults, advice]


def _told(record: Record) -> list[Entry]:
    return [entry for entry in record.routing if _loads(entry)]


def _top_k(record: Record) -> float:
    top_k = number(record.config, "model", "moe", "top_k")
    return top_k if math.isfinite(top_k) else 1.0


@dataclass(frozen=True)
class Lately:
    """What a layer did in the last lines of metrics. load: choices by expert; tokens: that made them."""

    layer: str
    load: list[float]
    tokens: float

    @property
    def even(self) -> float:
        """The choices of each expert if all had as many."""
        return sum(self.load) / len(self.load)

    def with_earlier(self, other: Lately) -> Lately:
        return Lately(self.layer, [a + b for a, b in zip(self.load, other.load, strict=True)], self.tokens + other.tokens)


def _sound(lately: Sequence[Lately], step: int) -> str:
    if min(each.even for each in lately) < ENOUGH:
        return f"At step {step:,} too few tokens were routed to tell whether every expert works."
    highest = max(max(each.load) / each.even for each in lately)
    return f"At step {step:,} every expert works; the busiest has {highest:.1f} times an even share."


def _faults(lately: Lately, top_k: float) -> list[str]:
    load, faults = lately.load, list[str]()
    busiest = max(range(len(load)), key=load.__getitem__)
    share = load[busiest] / lately.tokens
    if top_k < len(load) and share > CROWDED:
        faults.append(f"Layer {lately.layer} has collapsed: expert {busiest + 1} takes {share:.0%} of the tokens.")
    idle = [index + 1 for index, count in enumerate(load) if count < IDLE * lately.even]
    if idle and lately.even >= ENOUGH:
        names = ", ".join(map(str, idle[:NAMED])) + (" and others" if len(idle) > NAMED else "")
        faults.append(f"Layer {lately.layer}: {len(idle)} of {len(load)} experts are dead, with next to no tokens: {names}.")
    return faults


def _lately(entries: Sequence[Entry], top_k: float) -> list[Lately]:
    """The sums of the last entries, as few of them as hold enough choices, by layer."""
    *before, last = (_counted(entry, top_k) for entry in entries)
    for earlier in reversed(before):
        alike = [len(each.load) for each in earlier] == [len(each.load) for each in last]
        if not alike or min(each.even for each in last) >= ENOUGH:
            break
        last = [a.with_earlier(b) for a, b in zip(last, earlier, strict=True)]
    return last


def _counted(entry: Entry, top_k: float) -> list[Lately]:
    """One entry; where it has no counts, it is taken to hold enough choices, `top_k` a token."""
    found: list[Lately] = []
    for place, (layer, shares) in enumerate(zip(_layers(entry), _loads(entry), strict=True)):
        choices, tokens = _value(entry, "choices", place), _value(entry, "tokens", place)
        if not (choices > 0 and tokens > 0):
            tokens = float(ENOUGH * len(shares))
            choices = top_k * tokens
        found.append(Lately(layer, [share * choices for share in shares], tokens))
    return found


def _panels(entries: Sequence[Entry], lately: Sequence[Lately]) -> list[Panel]:
    layers = [each.layer for each in lately]
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
                [[count / each.even for count in each.load] for each in lately],
                x_label="expert",
                scale_label="times an even share",
                description="Load of each expert in each layer",
            ),
            f"Load by expert, step {int(entries[-1]['step']):,}",
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
            f"Between 0, a token asks one expert alone, and {math.log(len(lately[0].load)):.2f}, it asks all alike.",
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
    """The share of each expert by layer; empty where the entry does not hold them."""
    layers, load = entry.get("layers"), entry.get("load")
    if not isinstance(layers, list) or not isinstance(load, list) or len(layers) != len(load) or not load:
        return []
    # All shares are 0 where no step of an entry was finite.
    whole = all(isinstance(row, list) and all(isinstance(share, int | float) for share in row) and any(row) for row in load)
    return load if whole else []


def _value(entry: Entry, key: str, place: int) -> float:
    values = entry.get(key)
    return number({"value": values[place]}, "value") if isinstance(values, list) and place < len(values) else math.nan
