"""The tiles at the top of the page: the model, its size, scores and speed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kilolayer.config import build
from kilolayer.errors import KilolayerError
from kilolayer.models.config import ModelConfig
from kilolayer.models.trainable_config import TrainableConfig
from kilolayer.report.experts_section import experts_summary
from kilolayer.report.numbers import show_count, show_number
from kilolayer.report.record import Record, number
from kilolayer.report.scores_section import score_sets, show_score
from kilolayer.terminal import plural

MOST_COUNTED = 4000  # layers: with more it would take a minute


@dataclass(frozen=True)
class Fact:
    """One tile: a name, its value in large letters, and a small note."""

    name: str
    value: str
    note: str = ""


def facts_of(record: Record) -> list[Fact]:
    """Recipe, depth, parameters, best loss, scores, experts and speed, as far as the record has them."""
    return [*_of_model(record), *_of_quality(record), *_of_experts(record), *_of_speed(record)]


def _of_model(record: Record) -> list[Fact]:
    """What the [model] table says, where it can be understood."""
    options = record.config.get("model")
    if not isinstance(options, dict):
        return []
    try:
        model = build(ModelConfig if record.task is None else record.task.load_config().model_class(), options)
    except KilolayerError:
        return []
    if isinstance(model, TrainableConfig):
        return [Fact("Model", model.title), Fact("Parameters", _count(model), model.widths)]
    depths = model.depths
    return [
        Fact("Recipe", model.recipe.title),
        Fact("Depth", depths.title, " and ".join(depths.sides)),
        Fact("Parameters", _parameters(model), model.widths),
    ]


def _parameters(model: ModelConfig) -> str:
    if model.depths.encoder + model.depths.decoder > MOST_COUNTED:
        return "not counted"
    return _count(model)


def _count(model: ModelConfig | TrainableConfig) -> str:
    from kilolayer.models.build import build_model

    return show_count(sum(parameter.numel() for parameter in build_model(model, device="meta", seed=0).parameters()))


def _of_quality(record: Record) -> list[Fact]:
    facts: list[Fact] = []
    losses = [entry for entry in record.valid if math.isfinite(number(entry, "loss"))]
    if losses:
        best = min(losses, key=lambda entry: number(entry, "loss"))
        known = math.isfinite(perplexity := number(best, "perplexity"))
        note = f"perplexity {show_number(perplexity)}, " if known else ""
        facts.append(Fact("Best validation loss", f"{best['loss']:.3f}", f"{note}step {int(best['step']):,}"))
    if record.task is None or (headline := record.task.headline) is None:
        return facts
    title, key = record.headline_title[:1].upper() + record.headline_title[1:], headline.key
    tests = score_sets(record.scores)
    tested = [(name, scores[key]) for name, scores in tests if math.isfinite(number(scores, key, "value"))]
    measured = [(number(entry, key), entry) for entry in record.valid if math.isfinite(number(entry, key))]
    if tested:
        facts.append(Fact(title, show_score(key, tested[0][1], headline), f"on {tested[0][0]}"))
    elif measured:
        best_of = max if headline.larger_is_better else min
        value, best = best_of(measured, key=lambda pair: pair[0])
        facts.append(Fact(title, show_score(key, {"value": value}, headline), f"validation, step {int(best['step']):,}"))
    return facts


def _of_experts(record: Record) -> list[Fact]:
    summary = experts_summary(record)
    return [] if summary is None else [Fact("Experts", *summary)]


def _of_speed(record: Record) -> list[Fact]:
    speeds = sorted(speed for entry in record.train if math.isfinite(speed := number(entry, "tokens_per_second")))
    unit = "token" if record.task is None else record.task.unit
    return [Fact("Speed", show_count(speeds[len(speeds) // 2]), f"{plural(unit)} per second (median)")] if speeds else []
