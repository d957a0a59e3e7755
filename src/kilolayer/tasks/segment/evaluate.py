"""kilolayer evaluate for a segmentation model: mean IoU and pixel accuracy with their intervals, and IoU by class."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kilolayer.cli.configuration import Flags
from kilolayer.cli.output import show_json, show_scores, show_table
from kilolayer.errors import InputError
from kilolayer.tasks.results import tables_of_tests

if TYPE_CHECKING:
    from kilolayer.runs.run import Run


def add_flags(parser: Flags) -> None:
    """A segmentation model has no flags of its own."""


def evaluate(run: Run, options: argparse.Namespace) -> int:
    """Print the scores, and the IoU of each class."""
    from kilolayer.runs.scoring import score_text
    from kilolayer.tasks.other_text import OtherText
    from kilolayer.tasks.segment.report import iou_by_class
    from kilolayer.tasks.segment.task import IOU

    if options.test:
        scores = score_text(run, OtherText(tuple(options.test)), device=options.device)
    else:
        scores = run.scores(options.device)
    if not tables_of_tests(scores):
        raise InputError(
            "the run has no test images", where=str(options.run), fix="name folders of images and label images: --test"
        )
    if options.json:
        show_json({"scores": tables_of_tests(scores), **{name: scores[name] for name in ("weights", IOU) if name in scores}})
        return 0
    show_scores(scores, run.registration.headline)
    if (table := iou_by_class(scores)) is not None:
        show_table("IoU by class", table.rows, table.header)
    return 0
