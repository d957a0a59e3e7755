"""The page of a diagnosis: the verdict, and the measurements by layer as plots and numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from kilolayer.display import Line, Part, Pictures, TitledTable
from kilolayer.files.writing import write
from kilolayer.probe.diagnosis import Diagnosis, Measurements
from kilolayer.report.figure import Series
from kilolayer.report.layer_plots import layers_by_kind_plot
from kilolayer.report.panel import Panel
from kilolayer.report.plots import line_plot
from kilolayer.report.table import Table
from kilolayer.report.templating import template

SHOWN_PLOTS = 2
"""In a notebook: the gradient by kind of sublayer and by layer."""
ByKind = Mapping[str, Mapping[str, Sequence[float]]]
ByLayer = Mapping[str, Sequence[float]]


def parts_of(diagnosis: Diagnosis) -> list[Part]:
    """What `kilolayer diagnose` prints: the verdict and the tables; in HTML also the plots of the gradient."""
    measured = diagnosis.measured
    stacks, updates = stacks_table(measured), updates_table(measured)
    parts: list[Part] = [Line(f"{subtitle(measured)}\n"), *map(Line, diagnosis.verdict()), Line()]
    parts += [
        TitledTable("By layer", stacks.rows, stacks.header),
        TitledTable("Model update", updates.rows, updates.header),
    ]
    if measured.changes:
        rows = [(f"{change.step:,}", f"{change.size:.3g}") for change in measured.changes]
        parts.append(TitledTable("Change in the output since the start", rows, ["step", "of itself"]))
    return [*parts, Pictures(lambda: islice(_pictures(measured), SHOWN_PLOTS))]


def write_diagnosis(path: Path, name: str, diagnosis: Diagnosis) -> None:
    """Write one self-contained page without scripts. name: of the run or configuration."""
    write(path, render_diagnosis(name, diagnosis).encode("utf-8", "backslashreplace"))


def render_diagnosis(name: str, diagnosis: Diagnosis) -> str:
    """The page as text."""
    measured = diagnosis.measured
    return template("diagnosis.html").render(
        name=name,
        under=subtitle(measured),
        verdict=diagnosis.verdict(),
        pictures=list(_pictures(measured)),
        updates=updates_table(measured),
        stacks=stacks_table(measured),
    )


def subtitle(measured: Measurements) -> str:
    """The subtitle: the model, and the step at which it was measured."""
    when = f"at step {measured.settings.step:,}" if measured.settings.step else "before training"
    return f"{measured.title}, {when}; loss {measured.loss:.4g} on one batch"


def updates_table(measured: Measurements) -> Table:
    """A table of how far one step moves the output."""
    step = measured.updates
    return Table(
        ["one step changes the output by", "matrices only", "all weights"],
        [
            [f"SGD, learning rate {step.sgd_lr:g}", f"{step.sgd_matrices:.2g}", f"{step.sgd_all:.2g}"],
            [f"Adam, learning rate {step.adam_lr:g}", f"{step.adam_matrices:.2g}", f"{step.adam_all:.2g}"],
        ],
    )


def stacks_table(measured: Measurements) -> Table:
    """A table of the first, the middle and the last layer of each stack."""
    header = ["layer", "gradient", "per parameter, over eps", "residual", "effective rank", "cosine", "attention", "dead ReLUs"]
    rows = []
    over_eps = measured.gradients.over_eps(measured.settings.eps)
    for side, norms in measured.gradients.layers.items():
        for index in dict.fromkeys((0, len(norms) // 2, len(norms) - 1)):
            entropies = [values[index] for values in measured.entropy.get(side, {}).values() if not math.isnan(values[index])]
            cells = [
                norms[index],
                over_eps[side][index],
                measured.residual[side][index + 1],
                _at(measured.rank.effective, side, index),
                _at(measured.rank.cosine, side, index),
                sum(entropies) / len(entropies) if entropies else math.nan,
                _at(measured.dead_units, side, index),
            ]
            rows.append([f"{side} {index + 1}", *(_shown(cell) for cell in cells)])
    return Table(header, rows)


def _at(stacks: ByLayer, side: str, index: int) -> float:
    """The value of a layer; NaN if it was not measured."""
    values = stacks.get(side, ())
    return values[index] if index < len(values) else math.nan


def _shown(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "-"


def _pictures(measured: Measurements) -> Iterator[Panel]:
    gradients = measured.gradients
    over_eps = gradients.over_eps(measured.settings.eps)
    inside = {
        side: {module: values for module, values in modules.items() if len(values) > 1}
        for side, modules in measured.norm_inputs.items()
    }
    yield _kinds(
        "gradient", gradients.kinds, "Gradient by layer and kind of sublayer", "The norm over all weights of a sublayer."
    )
    yield _lines("gradient-layers", gradients.layers, "Gradient by layer", "", log=True)
    yield _lines("over-eps", over_eps, "Gradient per parameter, over Adam's eps", "Far below 1, updates vanish.", log=True)
    yield _kinds("norm-inputs", inside, "Input of each norm", "Root mean square, by which the norm divides the gradient.")
    yield _lines("residual", measured.residual, "Residual stream", "Root mean square; layer 0 is the input.", log=True, first=0)
    yield _lines("rank", measured.rank.effective, "Effective rank of the states", f"The width is {measured.width}.")
    yield _lines("cosine", measured.rank.cosine, "Mean cosine between positions", "1: all positions have the same state.")
    uniform = "1: uniform over all visible positions; 0: a single position."
    yield _kinds("entropy", measured.entropy, "Attention entropy", uniform, log=False)
    yield _lines("dead-units", measured.dead_units, "Share of dead ReLUs", "ReLUs that are 0 for the whole batch.")
    if measured.changes:
        line = Series(
            "change", [0, *(each.step for each in measured.changes)], [0.0, *(each.size for each in measured.changes)]
        )
        svg = line_plot(
            "changes",
            [line],
            x_label="step",
            y_label="change in the output",
            description="Change in the output since the start, by step",
            from_zero=True,
        )
        yield Panel(svg, "Accumulated change in the output", "||F(x, step) - F(x, 0)|| / ||F(x, 0)||")


def _kinds(name: str, stacks: ByKind, title: str, note: str, *, log: bool = True) -> Panel:
    readable = {
        side: {kind.removesuffix("_norm").replace("_", " ").replace(".", ", "): list(values) for kind, values in kinds.items()}
        for side, kinds in stacks.items()
    }
    svg = layers_by_kind_plot(name, readable, scale_label=title.partition(" by ")[0].lower(), description=title, log=log)
    return Panel(svg, title, note)


def _lines(name: str, stacks: ByLayer, title: str, note: str, *, log: bool = False, first: int = 1) -> Panel:
    series = [Series(side, range(first, first + len(values)), values) for side, values in stacks.items()]
    label = title.partition(",")[0]
    svg = line_plot(name, series, x_label="layer", y_label=label[0].lower() + label[1:], description=title, log=log)
    return Panel(svg, title, note)
