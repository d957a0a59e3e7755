"""kilolayer classify: label images with an image classifier."""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kilolayer.cli.configuration import add_device, int_between
from kilolayer.cli.output import show_json, write_text
from kilolayer.errors import unknown
from kilolayer.terminal import counted, say

if TYPE_CHECKING:
    from kilolayer.tasks.classify_image.image_classifier import ImagePrediction


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder of an image classifier")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image files, folders, or .tar archives of images")
    parser.add_argument("--top", type=int_between(1, 10**6), default=5, metavar="N", help="classes to show for each image [5]")
    add_device(parser)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="precision of the matrix products [fp32]")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Label the images; the exit code is 1 if one could not be read."""
    if typed:
        raise unknown(typed[0].partition("=")[0], ["--top", "--device", "--precision", "--json"])
    from kilolayer.runs.run import Run
    from kilolayer.tasks.classify_image.image_classifier import ImageClassifier

    classifier = ImageClassifier(Run.open(options.run, ["classify_image"]), device=options.device, precision=options.precision)
    faults, tables = [], []
    for prediction in classifier.classifications(options.images):
        if prediction.fault is not None:
            faults.append(prediction)
        if options.json:
            tables.append(_table(prediction, options.top))
        elif prediction.fault is None:
            write_text(f"{_line(prediction, options.top)}\n")
    if options.json:
        show_json(tables)
    for each in faults:
        say(f"{each.image}: {each.fault}")
    if faults:
        say(f"{counted(len(faults), 'image')} could not be read")
    return int(bool(faults))


def _table(prediction: ImagePrediction, top: int) -> dict[str, Any]:
    """The values for JSON."""
    if prediction.fault is not None:
        return {"image": prediction.image, "fault": prediction.fault}
    shares = dict(islice(prediction.probabilities.items(), top))
    return {"image": prediction.image, "label": prediction.label, "probabilities": shares}


def _line(prediction: ImagePrediction, top: int) -> str:
    """The image, its class, then the most probable classes with their probabilities."""
    shares = (f"{name}={share:.4f}" for name, share in islice(prediction.probabilities.items(), top))
    return "\t".join([prediction.image, str(prediction.label), *shares])
