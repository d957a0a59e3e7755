"""What a segmentation model adds to the report: IoU by class, and images with their true and predicted classes in colors."""

from __future__ import annotations

import re
from typing import Any

from markupsafe import Markup

from kilolayer.data.overlays import class_colors
from kilolayer.report.panel import Panel
from kilolayer.report.record import Record
from kilolayer.report.table import Table
from kilolayer.report.task_report import Section, TaskReport, TitledTable
from kilolayer.tasks.segment.task import IOU, OVERLAYS

BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
MOST_CLASSES = 255
NOTE = "From left to right: the image, the classes of its label image, and those that the model predicts."


class SegmentReport(TaskReport):
    """The IoU of each class, and a few images beside their true and predicted classes."""

    def sections(self, record: Record, prefix: str) -> list[Section]:
        table = iou_by_class(record.scores)
        if table is None:
            return []
        panels = []
        picture = record.scores.get(OVERLAYS)
        if isinstance(picture, str) and BASE64.fullmatch(picture):
            shown = Markup(
                '<img src="data:image/jpeg;base64,{}" alt="Images with their true and predicted classes in colors" '
                'style="width: 100%">{}'
            ).format(picture, _legend([row[0] for row in table.rows]))
            panels.append(Panel(shown, "Classes in colors", NOTE))
        return [Section("Classes", [], panels, [TitledTable("IoU by class", table)])]


def iou_by_class(scores: dict[str, Any]) -> Table | None:
    """The IoU of each class with its 95% interval, from scores.json; None if it is not there in this form."""
    found = scores.get(IOU)
    if not isinstance(found, list) or not 1 <= len(found) <= MOST_CLASSES or not all(map(_is_class, found)):
        return None
    rows = []
    for each in found:
        known = each["iou"] is not None
        shown = [f"{each['iou']:.2f}", f"{each['low']:.2f} to {each['high']:.2f}"] if known else ["absent", ""]
        rows.append([each["name"], f"{each['pixels']:,}", *shown])
    return Table(["class", "pixels", "IoU, %", "95% interval"], rows)


def _is_class(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return False
    pixels, values = entry.get("pixels"), [entry.get(key) for key in ("iou", "low", "high")]
    counted = isinstance(pixels, int) and not isinstance(pixels, bool) and 0 <= pixels < 2**60
    scored = all(isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 100 for value in values)
    return counted and (scored or values == [None] * 3)


def _legend(classes: list[str]) -> Markup:
    """The color of each class."""
    chip = '<span style="white-space: nowrap"><span style="color: rgb({}, {}, {})">&#9632;</span> {}</span> '
    colors = class_colors(len(classes)).tolist()
    return Markup("").join(Markup(chip).format(*color, name) for color, name in zip(colors, classes, strict=True))
