"""What an image classifier adds to the report: which classes are taken for which."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup

from kilolayer.evaluate.image_labels import wilson
from kilolayer.report.colour_scale import ColourScale
from kilolayer.report.figure import STYLE, new_axes, shortened, to_svg
from kilolayer.report.panel import Panel
from kilolayer.report.record import Record
from kilolayer.report.table import Table
from kilolayer.report.task_report import Section, TaskReport, TitledTable

MOST_CLASSES, NAMED, NUMBERED = 1000, 40, 14
"""Classes of the largest picture, of one with their names, and of one with numbers."""
PAIRS = 10
NOTE = "Each row is a class, and its colors are the shares in which its images are taken for the class of the column."


class ImageClassifierReport(TaskReport):
    """A picture of the confusions, accuracy by class, and the pairs of classes that are confused most."""

    def sections(self, record: Record, prefix: str) -> list[Section]:
        found = confusion_of(record.scores)
        if found is None:
            return []
        classes, counts = found
        panel = Panel(_picture(f"{prefix}confusion", classes, counts), "Confusion", NOTE)
        tables = [TitledTable("Accuracy by class", accuracy_by_class(classes, counts))]
        if pairs := _pairs(classes, counts):
            tables.append(TitledTable("Confused most", Table(["class", "taken for", "images"], pairs)))
        return [Section("Classes", [], [panel], tables)]


def confusion_of(scores: dict[str, Any]) -> tuple[list[str], np.ndarray] | None:
    """The classes and the counts [class, predicted class] in scores.json; None if they are not there in this form."""
    classes, counts = scores.get("classes"), scores.get("confusion")
    if not isinstance(classes, list) or not isinstance(counts, list) or not 2 <= len(classes) <= MOST_CLASSES:
        return None
    try:
        confusion = np.array(counts, dtype=np.float64)
    except (ValueError, TypeError):
        return None
    fits = confusion.shape == (len(classes), len(classes)) and np.isfinite(confusion).all() and (confusion >= 0).all()
    return ([str(name) for name in classes], confusion) if fits else None


def _picture(name: str, classes: list[str], counts: np.ndarray) -> Markup:
    shares = counts / counts.sum(axis=1, keepdims=True).clip(min=1)
    side = 3.4 if len(classes) <= NUMBERED else 4.8
    with mpl.rc_context(STYLE):
        figure, axes = new_axes("predicted class", "class", (side + 1.2, side + 0.4))
        scale = ColourScale(0.0, 1.0, is_log=False)
        drawn = scale.draw(axes, shares)
        if len(classes) <= NAMED:
            names = [shortened(each) for each in classes]
            axes.set_xticks(range(len(names)), names, rotation=90 if len(names) > 3 else 0)
            axes.set_yticks(range(len(names)), names)
        if len(classes) <= NUMBERED:
            for (row, column), count in np.ndenumerate(counts):
                ink = "#111111" if shares[row, column] > 0.6 else "#ffffff"
                axes.text(column, row, f"{count:.0f}", ha="center", va="center", color=ink, fontsize=7)
        bar = figure.colorbar(drawn, ax=axes, fraction=0.05)
        bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
        return to_svg(figure, name, "Shares of each class's images by predicted class")


def accuracy_by_class(classes: list[str], counts: np.ndarray) -> Table:
    """The accuracy of each class that has images, with its 95% interval."""
    rows = []
    for name, right, total in zip(classes, np.diag(counts), counts.sum(axis=1), strict=True):
        if total:
            low, high = wilson(int(right), int(total))
            rows.append([name, f"{total:,.0f}", f"{100 * right / total:.1f}", f"{100 * low:.1f} to {100 * high:.1f}"])
    return Table(["class", "images", "accuracy, %", "95% interval"], rows)


def _pairs(classes: list[str], counts: np.ndarray) -> list[list[str]]:
    wrong = np.where(np.eye(len(classes), dtype=bool), 0, counts)
    order = np.argsort(-wrong, axis=None, kind="stable")[:PAIRS]
    found = [(int(index) // len(classes), int(index) % len(classes)) for index in order]
    return [[classes[row], classes[column], f"{wrong[row, column]:.0f}"] for row, column in found if wrong[row, column]]
