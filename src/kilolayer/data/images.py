"""The images of a run: which folders or archives, their size and their classes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

from torch import Tensor

from kilolayer.config import bounded, check
from kilolayer.data.image_decoding import require_vision
from kilolayer.data.image_set import HELD, KEPT, ImageSet, class_of, prepared_images
from kilolayer.data.image_source import ImageSource, parse_sources
from kilolayer.errors import InputError, OptionError, UnusedOptionError, shown
from kilolayer.terminal import counted, say

LARGEST_SIDE = 4096
SIZE = re.compile(r"([1-9]\d{0,3})x([1-9]\d{0,3})")
PARTS = {"train", "training", "valid", "val", "validation", "test", "testing"}
"""Names of folders that are parts of a data set rather than classes."""


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """`[images]`: the images of a run, and how they are read."""

    train: str | None = None
    """Training images: a folder with one folder per class, or a .tar, .tar.gz or .tar.xz of it; `path.tar.xz:inner/folder`
    names a folder in an archive."""
    valid: str | None = None
    """Validation images, used to choose the best checkpoint."""
    test: str | None = None
    """Test images, scored once."""
    size: int | str = bounded(32, least=4, most=LARGEST_SIDE)
    """Height and width of an image in pixels: one number, or "360x480", height first. Other images are scaled by the shorter
    side and cropped around the center."""
    channels: int = bounded(3, least=1, most=3)
    """3: color; 1: grey."""
    valid_share: float = bounded(0.0, least=0, below=1)
    """Share of each class of the training images that is held out for validation."""
    classes: list[str] = field(default_factory=list)
    """The classes, in order. Default: the folders of the training images, sorted."""
    rows: int = bounded(128, least=1, most=2**20)
    """Images per batch."""

    def __post_init__(self) -> None:
        check(self)
        height_and_width(self.size)
        if self.channels == 2:
            raise OptionError("channels is 2", fix="channels must be 3, for color, or 1, for grey")
        if self.valid_share and self.valid is not None:
            raise UnusedOptionError(
                "valid_share has no effect where valid names the validation images",
                fix="remove one of them",
                unused="valid_share",
                beside=("valid",),
                either=True,
            )
        if len(set(self.classes)) < len(self.classes) or len(self.classes) == 1:
            raise OptionError(f"classes are {shown(self.classes)}", fix="list at least two, each once")

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return height_and_width(self.size)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        return *self.sides, self.channels

    def absolute(self) -> dict[str, str]:
        """The fields that name folders or archives, with absolute paths, which a run stores."""
        given = {name: getattr(self, name) for name in self.sources()}
        return {name: ImageSource.parse(text).absolute() for name, text in given.items() if text is not None}

    @classmethod
    def sources(cls) -> tuple[str, ...]:
        """The names of the fields that name folders or archives."""
        return "train", "valid", "test"


def height_and_width(size: int | str) -> tuple[int, int]:
    """The sides of an image from the form in which configurations name them: 32, or "360x480", height first."""
    if isinstance(size, int):
        return size, size
    found = SIZE.fullmatch(size)
    sides = (0, 0) if found is None else (int(found[1]), int(found[2]))
    if not 4 <= min(sides) <= max(sides) <= LARGEST_SIDE:
        raise OptionError(
            f"size is {shown(size)}", fix=f'size must be a number, or text such as "360x480", of 4 to {LARGEST_SIDE}'
        )
    return sides


@dataclass(frozen=True)
class ImageParts:
    """All images of a run. notes: what was left out or changed, and which test images are training images too."""

    train: ImageSet
    valid: ImageSet | None
    test: ImageSet | None
    notes: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes, in order; empty if the images have no labels."""
        return self.train.classes


def find_images(config: ImagesConfig, cache: Path, *, labelled: bool = True) -> ImageParts:
    """Decode the images of all parts into arrays below `cache`, unless they are there, and check their classes.

    labelled: the images are in folders by class; otherwise folders have no meaning, and there are no labels.
    """
    require_vision()
    if config.train is None:
        raise OptionError(
            "no training images are given", where="images", fix="set images.train: a folder with a folder for each class"
        )
    sources = parse_sources({name: getattr(config, name) for name in config.sources()})
    share = {"train": config.valid_share}
    folders = {
        name: prepared_images(source, config.shape, cache, share.get(name, 0.0), labelled=labelled)
        for name, source in sources.items()
    }
    train = ImageSet(folders["train"], KEPT, str(sources["train"]))
    classes = classes_of(train, config.classes) if labelled else ()
    parts = {name: ImageSet(folder, KEPT, str(sources[name]), classes) for name, folder in folders.items()}
    if config.valid_share:
        parts["valid"] = ImageSet(folders["train"], HELD, str(sources["train"]), classes)
    notes = tuple(note for name, part in parts.items() for note in part_notes(name, part, parts["train"]))
    return ImageParts(parts["train"], parts.get("valid"), parts.get("test"), notes)


def read_images(text: str, config: ImagesConfig, cache: Path) -> ImageSet:
    """Other labelled images than the run's own, whose classes must be known."""
    require_vision()
    source = ImageSource.parse(text)
    part = ImageSet(prepared_images(source, config.shape, cache), KEPT, str(source), config.classes)
    for note in part_notes("test", part):
        say(note)
    return part


def classes_of(train: ImageSet, given: Sequence[str]) -> tuple[str, ...]:
    """The classes of training images: those given, or their first folders, sorted; numbers are sorted by value."""
    found = {class_of(name) for name in train.names}
    if "" in found:
        loose = [name for name in train.names if not class_of(name)]
        raise InputError(
            f"{len(loose):,} of {len(train):,} images are in no folder of a class: {loose[0]}, ...",
            where=train.source,
            fix="put the images of each class into a folder of its name",
        )
    if found <= PARTS:
        joint = "/" if Path(train.source).is_dir() else ":"
        raise InputError(
            f"the folders are {', '.join(sorted(found))}: parts of a data set, not classes",
            where=train.source,
            fix=f"name the folder above the classes: {train.source}{joint}{min(found, key=_not_for_training)}",
        )
    if empty := sorted({*train.empty_folders, *given} - found):
        raise InputError(
            f"the class {shown(empty[0])} has no training image" + (f", and {len(empty) - 1} others" if empty[1:] else ""),
            where=train.source,
            fix="add images, or remove the class",
        )
    if len(found) < 2:
        raise InputError(
            f"all training images are of the class {shown(min(found))}", where=train.source, fix="add another class"
        )
    if given:
        return tuple(given)
    if all(name.isascii() and name.isdigit() for name in found):
        return tuple(sorted(found, key=lambda name: (Decimal(name), name)))
    return tuple(sorted(found))


def _not_for_training(folder: str) -> tuple[bool, str]:
    """Sorts the parts of a data set: those for training first."""
    return not folder.startswith("train"), folder


def normalized(pixels: Tensor) -> Tensor:
    """Pixels, uint8 of any shape, as numbers from -1 to 1: (x / 255 - 0.5) / 0.5."""
    return pixels.float() / 127.5 - 1


def part_notes(part: str, images: ImageSet, train: ImageSet | None = None) -> list[str]:
    """What is to be said about a part: what was left out or changed, classes without images, images of the training set."""
    notes = [f"images.{part}: {line}" for line in images.notes]
    if absent := images.absent_classes:
        listed = f"{', '.join(absent[:5])}{', ...' if absent[5:] else ''}"
        notes.append(f"images.{part}: no {images.labelled} of {counted(len(absent), 'class')} ({listed})")
    if train is not None and images is not train and (equal := images.equal_images(train)):
        shown_names = f"{', '.join(equal[:5])}{', ...' if equal[5:] else ''}"
        notes.append(f"images.{part}: {len(equal):,} have exactly the pixels of a training image ({shown_names})")
    return notes
