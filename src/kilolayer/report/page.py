"""One HTML page for a run: self-contained, without scripts, readable on a telephone and on paper."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from kilolayer.config import build
from kilolayer.errors import KilolayerError
from kilolayer.models.config import ModelConfig
from kilolayer.report.depth import layers, unreached
from kilolayer.report.experts_section import experts, state, unbalanced
from kilolayer.report.markup import (
    bullets,
    folded,
    folded_if_long,
    pre,
    rest,
    section,
    show_count,
    show_duration,
    show_number,
    table,
)
from kilolayer.report.panels import curves, errors
from kilolayer.report.record import Entry, Record, number, read_record

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 1160px; background: #fff; color: #1d1d1f;
       font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; padding-bottom: .2rem; border-bottom: 1px solid #d8d8d8; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p { margin: .4rem 0; max-width: 46rem; }
.under { color: #57575c; margin-bottom: 1rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .6rem; margin: 1rem 0; }
.facts div { border: 1px solid #d8d8d8; border-radius: 6px; padding: .5rem .7rem; }
.facts dt { color: #57575c; font-size: .8rem; }
.facts dd { margin: 0; font-size: 1.25rem; font-weight: 600; overflow-wrap: anywhere; }
.facts small { display: block; color: #57575c; font-size: .75rem; font-weight: 400; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)); gap: 1rem; }
figure { margin: 0; min-width: 0; }
figcaption { font-size: .9rem; font-weight: 600; }
figcaption small { display: block; color: #57575c; font-weight: 400; }
svg { display: block; width: 100%; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #e8e8e8; }
th { font-weight: 600; font-size: .9rem; }
td.number, th.number { text-align: right; white-space: nowrap; }
code, pre { font: .8rem/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
td code { overflow-wrap: anywhere; color: #57575c; }
pre { background: #f5f5f7; border-radius: 6px; padding: .8rem; overflow-x: auto; margin: .4rem 0; }
.sample { border-left: 3px solid #0072B2; padding: .1rem 0 .1rem .8rem; margin: 0 0 1rem; max-width: 46rem; }
.sample dt { color: #57575c; font-size: .75rem; }
.sample dd { margin: 0 0 .3rem; overflow-wrap: anywhere; white-space: pre-wrap; }
.sample dd.hypothesis, .sample dd.continuation { font-weight: 600; }
ul { padding-left: 1.2rem; margin: .4rem 0; }
li { overflow-wrap: anywhere; }
summary { cursor: pointer; color: #00568a; }
@media print { details > * { display: block; } .plots { grid-template-columns: 1fr 1fr; } figure { break-inside: avoid; } }
"""

SHOWN_EVENTS, SHOWN_SAMPLES, SHOWN_LOG = 40, 30, 60
SCORE_NAMES = {"bleu": "BLEU", "chrf": "chrF++", "ter": "TER", "spbleu": "spBLEU", "meteor": "METEOR"}
HEADLINES = {"bleu": ("BLEU", 1, max), "bits_per_byte": ("Bits per byte", 3, min)}  # name, digits, and which is the best
SAMPLE_PARTS = {  # of a translation, and of a continuation
    "source": "source",
    "reference": "reference",
    "hypothesis": "hypothesis",
    "prompt": "prompt",
    "text": "how the text goes on",
    "continuation": "how the model goes on",
}


@dataclass(frozen=True)
class Report:
    """The page, and in words what is wrong with the model."""

    path: Path
    warnings: list[str]


def write_report(run: Path) -> Report:
    """Write report.html into the run folder from what is there by now."""
    record = read_record(run)
    path = run / "report.html"
    draft = path.with_suffix(".html.part")
    draft.write_text(render(record), encoding="utf-8")
    os.replace(draft, path)  # a reader never meets half a page
    return Report(path, _ailments(record))


def render(record: Record) -> str:
    """The page of a record."""
    sections = [
        _headline(record),
        section("Warnings", _warnings(record)),
        section("Scores", _scores(record.scores)),
        section("Training", curves(record)),
        section("Languages", _directions(record.valid)),
        section(_title_of_samples(record.samples), _samples(record.samples)),
        section("Where the errors lie", errors(record.scores)),
        section("Experts", experts(record)),
        section("Norms by layer", layers(record.layers)),
        section("Configuration", pre(record.config_text)),
        section("Log", _log(record.log)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(record.name)} - Kilolayer</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(each for each in sections if each)
        + "\n</body>\n</html>\n"
    )


def _headline(record: Record) -> str:
    facts = [*_model_facts(record.config), *_result_facts(record)]
    cells = [
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{f'<small>{escape(note)}</small>' if note else ''}</dd></div>"
        for name, value, note in facts
    ]
    return f'<header>\n<h1>{escape(record.name)}</h1>\n<p class="under">{_progress(record)}</p>\n</header>' + (
        f'\n<dl class="facts">{"".join(cells)}</dl>' if cells else ""
    )


def _progress(record: Record) -> str:
    if not record.train:
        return "No training step is recorded yet."
    last = record.train[-1]
    parts = [f"{int(last['step']):,} steps"]
    if math.isfinite(epoch := number(last, "epoch")):
        parts.append(f"{epoch:.3g} epochs")
    if math.isfinite(seconds := number(last, "seconds")):
        parts.append(show_duration(seconds))
    return escape(", ".join(parts))


def _model_facts(config: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Recipe, depth and parameters, as far as the [model] table can be understood."""
    options = config.get("model")
    if not isinstance(options, dict):
        return []
    try:
        model = build(ModelConfig, options)
    except KilolayerError:
        return []
    depths = model.depths
    return [
        ("Recipe", model.recipe.title, ""),
        ("Depth", depths.title, " and ".join(depths.sides)),
        ("Parameters", show_count(_parameters(model)), model.widths),
    ]


def _parameters(model: ModelConfig) -> int:
    from kilolayer.models.build import build_model

    return sum(parameter.numel() for parameter in build_model(model, device="meta").parameters())


def _result_facts(record: Record) -> list[tuple[str, str, str]]:
    facts: list[tuple[str, str, str]] = []
    losses = [entry for entry in record.valid if math.isfinite(number(entry, "loss"))]
    if losses:
        best = min(losses, key=lambda entry: entry["loss"])
        perplexity = f"perplexity {show_number(math.exp(min(best['loss'], 700)))}, "
        facts.append(("Best validation loss", f"{best['loss']:.3f}", f"{perplexity}step {int(best['step']):,}"))
    for key, (title, digits, best_of) in HEADLINES.items():
        tests = [(name, number(scores, key, "value")) for name, scores in _score_sets(record.scores)]
        tested = [(name, value) for name, value in tests if math.isfinite(value)]
        measured = [(number(entry, key), entry) for entry in record.valid if math.isfinite(number(entry, key))]
        if tested:
            facts.append((title, f"{tested[0][1]:.{digits}f}", f"on {tested[0][0]}"))
        elif measured:
            value, best = best_of(measured, key=lambda pair: pair[0])
            facts.append((title, f"{value:.{digits}f}", f"validation, step {int(best['step']):,}"))
    if (found := state(record)) is not None:
        facts.append(("Experts", *found))
    speeds = sorted(speed for entry in record.train if math.isfinite(speed := number(entry, "tokens_per_second")))
    if speeds:
        facts.append(("Speed", show_count(speeds[len(speeds) // 2]), "tokens a second (median)"))
    return facts


def _ailments(record: Record) -> list[str]:
    """Layers that the gradient does not reach, and experts that nobody asks, that take all, or that are full."""
    return [*unreached(record.layers), *unbalanced(record)]


def _warnings(record: Record) -> str:
    """What went wrong, in words: ailments of the model, skipped steps, events, warnings of the log, unreadable files."""
    items = [*_ailments(record), *record.notes]
    skipped = [entry for entry in record.event if "skipped" in str(entry.get("text", ""))]
    if skipped:
        items.append(
            f"{len(skipped)} {'step was' if len(skipped) == 1 else 'steps were'} skipped and left no trace in the model."
        )
    texts = [f"Step {int(entry['step']):,}: {_without_step(str(entry.get('text', '')), entry)}" for entry in record.event]
    texts += [line for line in record.log if re.search(r"\b(warning|error)\b", line, re.IGNORECASE)]
    if not items and not texts:
        return "<p>None: no step was skipped, and the log holds no warning.</p>" if record.train else ""
    return bullets(items + texts[:SHOWN_EVENTS]) + rest(len(texts) - SHOWN_EVENTS, "in log.txt and metrics.jsonl")


def _without_step(text: str, entry: Entry) -> str:
    """The text of an event without the step that it may begin with, which stands before it on the page."""
    return text.removeprefix(f"step {int(entry['step'])}").lstrip(" :,") or text


def _score_sets(scores: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The test sets of scores.json: tables whose entries have a value, or the reason why there is none."""
    return [
        (name, entries)
        for name, entries in scores.items()
        if isinstance(entries, dict)
        and any(isinstance(each, dict) and each.keys() & {"value", "reason"} for each in entries.values())
    ]


def _scores(scores: dict[str, Any]) -> str:
    sets = _score_sets(scores)
    if len(sets) > 1:
        return _scores_by_direction(sets, scores.get("averages"))
    head = '<tr><th scope="col">score</th><th scope="col" class="number">value</th><th scope="col">signature</th></tr>'
    tables: list[str] = []
    for name, entries in sets:
        rows = [_score_row(key, score) for key, score in entries.items() if isinstance(score, dict)]
        tables.append(f"<h3>{escape(name)}</h3>\n<table>{head}{''.join(rows)}</table>")
    return "\n".join(tables)


def _scores_by_direction(sets: Sequence[tuple[str, dict[str, Any]]], averages: Any) -> str:
    """The averages, a row a direction, and once how each score was computed."""
    found = [(key, score) for _, entries in sets for key, score in entries.items() if isinstance(score, dict)]
    names = {key: str(score.get("name") or SCORE_NAMES.get(key, key)) for key, score in found}
    header = ["", *names.values()]
    means = averages if isinstance(averages, dict) else {}
    averaged = [[f"average {side}", *(show_number(number(means, side, key)) for key in names)] for side in means]
    rows = [[part, *(show_number(number(entries, key, "value")) for key in names)] for part, entries in sets]
    how = [
        f"{names[key]}: {score.get('signature') or 'not available: ' + str(score.get('reason', ''))}" for key, score in found
    ]
    return (table(header, averaged) if averaged else "") + folded_if_long(header, rows) + bullets(list(dict.fromkeys(how)))


def _score_row(key: str, score: Entry) -> str:
    label = f'<th scope="row">{escape(str(score.get("name") or SCORE_NAMES.get(key, key)))}</th>'
    value = number(score, "value")
    if not math.isfinite(value):
        return f'<tr>{label}<td colspan="2">not available: {escape(str(score.get("reason", "it has no value")))}</td></tr>'
    signature = escape(str(score.get("signature", ""))).replace("|", "|<wbr>")
    digits = score.get("digits") if isinstance(score.get("digits"), int) else 2
    return f'<tr>{label}<td class="number">{value:.{digits}f}</td><td><code>{signature}</code></td></tr>'


def _directions(valid: Sequence[Entry]) -> str:
    """Loss and BLEU of each direction at the last validation that measured them."""
    measured = [entry for entry in valid if isinstance(entry.get("directions"), dict) and entry["directions"]]
    if not measured:
        return ""
    last = measured[-1]
    rows = [
        [name, *(show_number(number(last, "directions", name, key)) for key in ("loss", "bleu"))] for name in last["directions"]
    ]
    return f"<p>Validation at step {int(last['step']):,}.</p>" + folded_if_long(["direction", "loss", "BLEU"], rows)


def _title_of_samples(samples: Sequence[Entry]) -> str:
    return "Sample continuations" if any("prompt" in sample for sample in samples) else "Sample translations"


def _samples(samples: Sequence[Entry]) -> str:
    blocks: list[str] = []
    for sample in samples[:SHOWN_SAMPLES]:
        lines = [
            f'<dt>{title}</dt><dd class="{name}" dir="auto">{escape(str(sample[name]))}</dd>'
            for name, title in SAMPLE_PARTS.items()
            if sample.get(name) is not None
        ]
        blocks.append(f'<dl class="sample">{"".join(lines)}</dl>')
    return "\n".join(blocks) + rest(len(samples) - SHOWN_SAMPLES, "in samples.json")


def _log(lines: Sequence[str]) -> str:
    last = lines[-SHOWN_LOG:]
    return folded(f"The last {len(last)} lines", pre("\n".join(last))) if any(last) else ""
