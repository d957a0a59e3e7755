"""kilolayer evaluate for an image classifier: accuracy with its interval, by class, and on corrupted images."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kilolayer.cli.configuration import Flags, int_between
from kilolayer.cli.output import show_json, show_line, show_scores, show_table
from kilolayer.errors import InputError, OptionError
from kilolayer.tasks.results import tables_of_tests

if TYPE_CHECKING:
    from kilolayer.runs.run import Run

MOST_CLASSES = 50
"""Classes that are listed on a terminal."""


def add_flags(parser: Flags) -> None:
    """Add the flags that only image classifiers have."""
    parser.add_argument(
        "--corruptions",
        action="store_true",
        help="errors on fifteen corruptions of the images at five strengths, and on sketches",
    )
    parser.add_argument(
        "--most", type=int_between(1, 10**9), metavar="N", help="corrupt only N images, from all over the set [all]"
    )


def evaluate(run: Run, options: argparse.Namespace) -> int:
    """Print the scores, or with --corruptions the errors on corrupted images."""
    from kilolayer.runs.scoring import score_text
    from kilolayer.tasks.other_text import OtherText

    if options.corruptions:
        return _evaluate_corruptions(run, options)
    if options.most is not None:
        raise OptionError("--most has no effect without --corruptions", where=str(options.run), fix="remove it")
    if options.test:
        scores = score_text(run, OtherText(tuple(options.test)), device=options.device)
    else:
        scores = run.scores(options.device)
    if not tables_of_tests(scores):
        raise InputError("the run has no test images", where=str(options.run), fix="name a folder of them: --test")
    if options.json:
        kept = {name: scores[name] for name in ("weights", "classes", "confusion") if name in scores}
        show_json({"scores": tables_of_tests(scores), **kept})
        return 0
    show_scores(scores, run.registration.headline)
    from kilolayer.tasks.classify_image.report import accuracy_by_class, confusion_of

    if (found := confusion_of(scores)) is not None:
        table = accuracy_by_class(*found)
        show_table("accuracy by class", table.rows[:MOST_CLASSES], table.header)
    return 0


def _evaluate_corruptions(run: Run, options: argparse.Namespace) -> int:
    from kilolayer.tasks.classify_image.image_classifier import ImageClassifier
    from kilolayer.terminal import LiveLine

    if len(options.test) > 1:
        raise OptionError("one folder at a time is corrupted", where="--test", fix="name one")
    live = LiveLine()
    found = ImageClassifier(run, device=options.device).corruptions(*options.test, most=options.most, show=live.show)
    live.clear()
    if options.json:
        show_json(found.table())
        return 0
    show_table(f"top-1 error by strength, % of {found.images:,} images", found.rows(), found.header)
    show_line(f"images as they are {found.clean:.2f}, sketches {found.sketch:.2f}")
    show_line(f"mean corruption error {found.mean_corruption_error:.2f} (mean of {15 * 5}, not relative to another model)")
    return 0
