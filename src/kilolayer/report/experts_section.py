"""The section about experts: how evenly they are loaded, in words and in plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kilolayer.report.figure import Series
from kilolayer.report.panel import Ends, Panel, chart_panel, series_of
from kilolayer.report.plots import heat_plot
from kilolayer.report.record import Entry, Record, number
from kilolayer.terminal import counted

IDLE = 0.01  # share of an even load below which an expert learns nothing
ENOUGH = 100  # choices per expert at an even load; with fewer, some experts get none by chance
CROWDED = 0.9  # of the tokens
OVERFULL = 0.2  # share of dropped choices above which too many tokens bypass a layer
NAMED = 8
LINES = 6


@dataclass(frozen=True)
class ExpertsSection:
    """Sentences about the experts, and the plots below them."""

    verdict: list[str]
    panels: list[Panel]


def experts_section(record: Record, ends: Ends | None = None, prefix: str = "") -> ExpertsSection | None:
    """Build the section: verdict, final loads, and entropy, loads and gradients by step; None for a dense run.

    ends: the range of steps that plots show. prefix: of the plots' names, which must be unique on a page.
    """
    if not (entries := _measured(record)):
        return None
    recent = _recent_loads(entries, _top_k(record))
    verdict = expert_faults(record) or [_balanced(recent, int(entries[-1]["step"]))]
    return ExpertsSection(verdict, _panels(entries, recent, ends, prefix))


def expert_faults(record: Record) -> list[str]:
    """Problems with the experts of each layer, and what to do; empty if there are none."""
    if not (entries := _measured(record)):
        return []
    recent = _recent_loads(entries, _top_k(record))
    faults = [fault for each in recent for fault in _faults(each)]
    if not faults:
        return []
    return [*faults, *_advice(record.config, recent)]


def experts_summary(record: Record) -> tuple[str, str] | None:
    """A short summary of the number of experts and their load; None for a dense run."""
    if not (entries := _measured(record)):
        return None
    recent = _recent_loads(entries, _top_k(record))
    collapsed, dead = sum(each.collapsed for each in recent), sum(len(each.dead) for each in recent)
    dropped = max(each.dropped_share for each in recent)
    faults = [
        f"{counted(collapsed, 'layer')} collapsed" if collapsed else "",
        f"{dead} dead" if dead else "",
        f"{dropped:.0%} dropped" if dropped > OVERFULL else "",
    ]
    balanced = "all in use" if all(each.has_enough_tokens for each in recent) else "too few tokens to tell"
    size = f"{len(recent[0].load)} in {'each of ' if len(recent) > 1 else ''}{counted(len(recent), 'layer')}"
    return ", ".join(filter(None, faults)) or balanced, f"{size}, step {int(entries[-1]['step']):,}"


def _measured(record: Record) -> list[Entry]:
    return [entry for entry in record.routing if _loads(entry)]


def _top_k(record: Record) -> float:
    top_k = number(record.config, "model", "moe", "top_k")
    return top_k if math.isfinite(top_k) else 1.0


@dataclass(frozen=True)
class LayerLoad:
    """The load of a layer's experts in the last entries of the metrics.

    load: choices by expert; tokens: the number of tokens, with up to `top_k` choices each; dropped: choices over capacity.
    """

    name: str
    load: list[float]
    tokens: float
    top_k: float
    dropped: float

    @property
    def even_load(self) -> float:
        """The number of choices per expert at an even load."""
        return sum(self.load) / len(self.load)

    @property
    def has_enough_tokens(self) -> bool:
        """Whether there are enough choices that an unused expert is not just chance."""
        return self.even_load >= ENOUGH

    @property
    def dead(self) -> list[int]:
        """The experts, counted from 1, with almost no tokens."""
        return (
            [index + 1 for index, count in enumerate(self.load) if count < IDLE * self.even_load]
            if self.has_enough_tokens
            else []
        )

    @property
    def collapsed(self) -> bool:
        """Whether nearly all tokens go to one expert, though not every expert has to take every token."""
        return self.top_k < len(self.load) and max(self.load) > CROWDED * self.tokens

    @property
    def dropped_share(self) -> float:
        """The share of choices that were dropped."""
        return self.dropped / sum(self.load)

    def with_earlier(self, other: LayerLoad) -> LayerLoad:
        load = [a + b for a, b in zip(self.load, other.load, strict=True)]
        return LayerLoad(self.name, load, self.tokens + other.tokens, self.top_k, self.dropped + other.dropped)


def _balanced(recent: Sequence[LayerLoad], step: int) -> str:
    if not all(each.has_enough_tokens for each in recent):
        return f"At step {step:,} too few tokens were routed to tell whether every expert is in use."
    highest = max(max(each.load) / each.even_load for each in recent)
    return f"At step {step:,} every expert is in use; the busiest takes {highest:.1f} times an even share."


def _faults(layer: LayerLoad) -> list[str]:
    load, faults = layer.load, list[str]()
    if layer.collapsed:
        busiest = max(range(len(load)), key=load.__getitem__)
        share = load[busiest] / layer.tokens
        faults.append(f"Layer {layer.name} has collapsed: expert {busiest + 1} takes {share:.0%} of the tokens.")
    if dead := layer.dead:
        names = ", ".join(map(str, dead[:NAMED])) + (" and others" if len(dead) > NAMED else "")
        are = "is" if len(dead) == 1 else "are"
        faults.append(f"Layer {layer.name}: {len(dead)} of {len(load)} experts {are} dead, with almost no tokens: {names}.")
    if layer.dropped_share > OVERFULL:
        faults.append(f"Layer {layer.name} drops {layer.dropped_share:.0%} of the tokens' choices: the experts are full.")
    return faults


def _advice(config: Entry, recent: Sequence[LayerLoad]) -> list[str]:
    """What to do about dropped choices, dead experts and collapsed layers."""
    advice: list[str] = []
    if any(each.dropped_share > OVERFULL for each in recent):
        capacity = number(config, "model", "moe", "capacity")
        now = f"now {capacity:g}, " if math.isfinite(capacity) else ""
        otherwise = "" if _frozen(config) else f", or balance the loads: raise {_balancer(config)}"
        advice.append(f"Raise model.moe.capacity ({now}1.25 is usual){otherwise}.")
    if any(each.collapsed or each.dead for each in recent):
        advice.append(_balancing(config))
    return advice


def _balancing(config: Entry) -> str:
    if _frozen(config):
        start = config["train"].get("start_from") or "a model that was never trained"
        return f"Experts and routers are frozen: the faults are those of {start}. Train without train.freeze."
    return f"Raise {_balancer(config)}, lower train.lr, or lengthen train.warmup_steps."


def _balancer(config: Entry) -> str:
    loss_free = number(config, "model", "moe", "loss_free") > 0
    return "model.moe.loss_free" if loss_free else "model.moe.balance or set model.moe.loss_free"


def _frozen(config: Entry) -> bool:
    train = config.get("train")
    return isinstance(train, dict) and train.get("freeze") == "experts"


def _recent_loads(entries: Sequence[Entry], top_k: float) -> list[LayerLoad]:
    """The load by layer, summed over the fewest last entries that have enough choices."""
    *before, last = (_layer_loads(entry, top_k) for entry in entries)
    for earlier in reversed(before):
        alike = [len(each.load) for each in earlier] == [len(each.load) for each in last]
        if not alike or all(each.has_enough_tokens for each in last):
            break
        last = [a.with_earlier(b) for a, b in zip(last, earlier, strict=True)]
    return last


def _layer_loads(entry: Entry, top_k: float) -> list[LayerLoad]:
    """The loads of one entry; without counts, it is assumed to have enough choices, `top_k` per token."""
    found: list[LayerLoad] = []
    for index, (layer, shares) in enumerate(zip(_layers(entry), _loads(entry), strict=True)):
        choices, tokens = _value(entry, "choices", index), _value(entry, "tokens", index)
        if not (choices > 0 and tokens > 0):  # NaN is neither
            tokens = float(ENOUGH * len(shares))
            choices = top_k * tokens
        dropped = _value(entry, "dropped", index)
        over = dropped * choices if math.isfinite(dropped) else 0.0
        found.append(LayerLoad(layer, [share * choices for share in shares], tokens, top_k, over))
    return found


def _panels(entries: Sequence[Entry], recent: Sequence[LayerLoad], ends: Ends | None, prefix: str) -> list[Panel]:
    layers = [each.name for each in recent]
    steps = [number(entry, "step") for entry in entries]
    indices = sorted({round(index * (len(layers) - 1) / (LINES - 1)) for index in range(LINES)})
    entropy = [Series(layers[which], steps, [_value(entry, "entropy", which) for entry in entries]) for which in indices]
    extremes = [
        Series("busiest", steps, [max(max(load) * len(load) for load in _loads(entry)) for entry in entries]),
        Series("least busy", steps, [min(min(load) * len(load) for load in _loads(entry)) for entry in entries]),
    ]
    norms = [series_of("all except experts", entries, "dense_norm"), series_of("experts", entries, "expert_norm")]
    temperature = [
        Series(layers[which], steps, [_value(entry, "temperature", which) for entry in entries]) for which in indices
    ]
    dropped = [Series(layers[which], steps, [_value(entry, "dropped", which) for entry in entries]) for which in indices]
    any_dropped = any(value > 0 for each in dropped for value in each.y if math.isfinite(value))

    def by_step(name: str, title: str, series: Sequence[Series], label: str, about: str, **options: Any) -> Panel:
        named = f"{prefix}{name}"
        return chart_panel(named, title, series, x_label="step", y_label=label, description=about, ends=ends, **options)

    evenness = f"From 0 (all weight on one expert) to {math.log(len(recent[0].load)):.2f} (the same weight on every expert)."
    extreme = "Load of the busiest and of the least busy expert in any layer, by step"
    return [
        Panel(
            heat_plot(
                f"{prefix}loads",
                layers,
                [[count / each.even_load for count in each.load] for each in recent],
                x_label="expert",
                scale_label="times an even share",
                description="Load of each expert in each layer",
            ),
            f"Load by expert, step {int(entries[-1]['step']):,}",
            "A dark cell is an expert with few tokens; a bright cell in a dark row is one that takes nearly all tokens.",
        ),
        by_step("extremes", "Busiest and least busy expert", extremes, "times an even share", extreme, from_zero=True),
        by_step(
            "entropy",
            "Entropy of the gates",
            entropy,
            "nats",
            "Entropy of the gates by step",
            note=evenness,
            from_zero=True,
        ),
        by_step(
            "expert-norms",
            "Gradient of the experts and of all other weights",
            norms,
            "gradient norm",
            "Parts of the gradient by step",
            note=_clippings(entries),
            log=True,
        ),
        by_step("temperature", "Temperature of the gates", temperature, "temperature", "Temperature by step"),
        by_step(
            "dropped",
            "Choices over an expert's capacity",
            dropped if any_dropped else [],
            "share",
            "Dropped choices by step",
            from_zero=True,
        ),
    ]


def _clippings(entries: Sequence[Entry]) -> str:
    clipped = sum(count for entry in entries if math.isfinite(count := number(entry, "clipped")))
    return f"Clipped in {int(clipped):,} of {counted(int(entries[-1]['step']), 'step')}."


def _layers(entry: Entry) -> list[str]:
    return [str(layer) for layer in entry["layers"]]


def _loads(entry: Entry) -> list[list[float]]:
    """The share of each expert by layer; empty if the entry does not have them."""
    layers, load = entry.get("layers"), entry.get("load")
    if not isinstance(layers, list) or not isinstance(load, list) or len(layers) != len(load) or not load:
        return []
    if not all(isinstance(row, list) and len(row) == len(load[0]) for row in load):
        return []
    shares = [[number({"share": share}, "share") for share in row] for row in load]
    # All shares are 0 if no step of an entry was finite.
    return shares if all(any(row) and all(share >= 0 for share in row) for row in shares) else []


def _value(entry: Entry, key: str, index: int) -> float:
    values = entry.get(key)
    return number({"value": values[index]}, "value") if isinstance(values, list) and index < len(values) else math.nan
