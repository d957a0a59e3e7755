"""What is printed about a run: samples of its output, its scores with their signatures, and its headline score."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kilolayer import hints
from kilolayer.display import Line, Part, Pictures, TitledTable
from kilolayer.files.paths import kind_of
from kilolayer.report.record import Record, read_record
from kilolayer.report.scores_section import scored_weights, show_score
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.registry import Headline, Registration
from kilolayer.tasks.results import read_samples, read_scores, tables_of_tests

if TYPE_CHECKING:
    from kilolayer.report.panel import Panel

SHOWN_SAMPLES = 5
SHOWN_PLOTS = 2
"""Of training: the loss, and the task's own measure or the norm of the gradient."""


class TrainedRun(Protocol):
    """The parts of a run that are shown here."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        ...

    @property
    def config(self) -> RunConfig:
        """Its configuration."""
        ...

    @property
    def registration(self) -> Registration:
        """Its task."""
        ...


def parts_of(run: TrainedRun) -> list[Part]:
    """What `kilolayer train` prints at the end of the run, or how far it has come; in HTML also its curves."""
    record = read_record(run.folder)
    pictures = Pictures(lambda: _plots(record))
    if kind_of(run.folder / "scores.json") is None:
        step = int(record.train[-1]["step"]) if record.train else 0
        done = f"step {step:,} of {run.config.train.steps:,}"
        how = hints.call("train", resume=run.folder)
        return [Line(f"{run.folder}: {run.registration.title}, {done}, not scored yet; continue with: {how}"), pictures]
    scores, task = read_scores(run.folder), run.registration
    shown = score_parts(scores, task.headline) or [Line("there are no scores: the run has no test set")]
    return [*sample_parts(read_samples(run.folder), task), *shown, *headline_parts(scores, task), pictures]


def _plots(record: Record) -> list[Panel]:
    from kilolayer.report.panels import steps_shown, training_panels  # imports matplotlib, which is not needed to print

    panels = training_panels([record], steps_shown([record])) if record.train else []
    return [panel for panel in panels if panel.svg is not None][:SHOWN_PLOTS]


def sample_parts(samples: Iterable[Mapping[str, str]], task: Registration) -> list[Part]:
    """A model's output on the first of the texts in samples.json, in the format of its task, if it has one."""
    parts: list[Part] = []
    for sample in list(samples)[:SHOWN_SAMPLES]:
        if task.samples is None:
            parts.append(Line("".join(f"{part}: {text}\n" for part, text in sample.items())))
        else:
            shown = task.samples.line.format_map(defaultdict(str, sample))
            parts.append(Line("\n".join(each.rstrip() for each in shown.split("\n"))))  # the last part of a line may be empty
    return [*parts, Line()] if parts else []


def score_parts(scores: dict[str, Any], headline: Headline | None = None) -> list[Part]:
    """The scores of each test set, with their signatures, and why a score is unavailable.

    scores: as in scores.json. headline: the task's main score, which may have more decimals.
    """
    tests = tables_of_tests(scores)
    if len(tests) > 1:
        return [*_direction_parts(tests, scores.get("averages", {}), headline), *_weight_parts(scores)]
    found = [
        TitledTable(
            name, [(each["name"], show_score(key, each, headline), _signature_or_reason(each)) for key, each in entry.items()]
        )
        for name, entry in tests.items()
    ]
    return [*found, *(_weight_parts(scores) if tests else [])]


def _weight_parts(scores: dict[str, Any]) -> list[Part]:
    return [Line(f"{text}\n")] if (text := scored_weights(scores)) else []


def headline_parts(scores: dict[str, Any], task: Registration) -> list[Part]:
    """The task's main score on the test set, if there is one test set."""
    tests, headline = tables_of_tests(scores), task.headline
    if len(tests) != 1 or headline is None:
        return []
    (entry,) = tests.values()
    score = entry.get(headline.key, {})
    if "value" not in score:
        return []
    return [Line(f"{score.get('name', headline.title)} {show_score(headline.key, score, headline)}")]


def _direction_parts(
    tests: dict[str, dict[str, Any]], averages: dict[str, dict[str, float]], headline: Headline | None
) -> Sequence[Part]:
    """A row per test set and direction, then the averages; how each score is computed is said once."""
    names = {key: each["name"] for entry in tests.values() for key, each in entry.items()}
    rows = [[part, *(show_score(key, entry.get(key, {}), headline) for key in names)] for part, entry in tests.items()]
    for side, values in averages.items():
        means = [show_score(key, {"value": values.get(key)}, headline) for key in names]
        rows.append([f"average {side}", *means])
    signatures = dict.fromkeys(
        f"{each['name']}: {_signature_or_reason(each)}" for entry in tests.values() for each in entry.values()
    )
    return [TitledTable("scores by test set", rows, ["", *names.values()]), *map(Line, signatures), Line()]


def _signature_or_reason(score: dict[str, Any]) -> str:
    return score["signature"] if "value" in score else f"not available: {score['reason']}"
