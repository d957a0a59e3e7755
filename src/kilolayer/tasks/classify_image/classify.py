"""kilolayer classify for an image classifier: a class, and the most probable classes, for each image."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kilolayer.cli.classify import Answer
from kilolayer.cli.configuration import Flags

if TYPE_CHECKING:
    from kilolayer.runs.run import Run


def add_flags(parser: Flags) -> None:
    """An image classifier has no flags of its own."""


def classify(run: Run, options: argparse.Namespace) -> Iterator[Answer]:
    """Yield the class and the probabilities of each image."""
    from kilolayer.tasks.classify_image.image_classifier import ImageClassifier

    classifier = ImageClassifier(run, device=options.device, precision=options.precision)
    for found in classifier.classifications(options.images):
        yield Answer(found.image, {"label": str(found.label)}, "probabilities", found.probabilities, found.fault)
