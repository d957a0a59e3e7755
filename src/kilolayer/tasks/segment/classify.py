"""kilolayer classify for a segmentation model: the share of each class in an image, and its classes in colors."""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kilolayer.cli.classify import Answer
from kilolayer.cli.configuration import Flags
from kilolayer.files.writing import make_folder, write
from kilolayer.terminal import counted, say

if TYPE_CHECKING:
    import numpy as np

    from kilolayer.runs.run import Run

FOLDER = Path("overlays")


def add_flags(parser: Flags) -> None:
    """Add the flags that only segmentation models have."""
    parser.add_argument(
        "--overlays",
        type=Path,
        default=FOLDER,
        metavar="FOLDER",
        help=f"write each image with its classes in colors into this folder, as NAME-overlay.png [{FOLDER}]",
    )


def classify(run: Run, options: argparse.Namespace) -> Iterator[Answer]:
    """Write the overlay of each image, and yield the shares of its classes."""
    from kilolayer.tasks.segment.segmenter import Segmenter

    segmenter, written = Segmenter(run, device=options.device, precision=options.precision), set()
    make_folder(options.overlays)
    for found in segmenter.segmentations(options.images):
        if found.fault is not None:
            yield Answer(found.image, {}, "shares", {}, found.fault)
            continue
        path = _new_name(options.overlays, found.image, written)
        write(path, _png(found.overlay()))
        yield Answer(found.image, {"overlay": str(path)}, "shares", found.shares)
    say(f"{counted(len(written), 'overlay')} written to {options.overlays}")


def _new_name(folder: Path, image: str, written: set[Path]) -> Path:
    """The file for an image's overlay, which is not that of an image; with a number if another image has the same name."""
    stem, number = Path(image.rpartition(":")[2]).stem, 1
    path = folder / f"{stem}-overlay.png"
    while path in written:
        number += 1
        path = folder / f"{stem}-overlay-{number}.png"
    written.add(path)
    return path


def _png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
