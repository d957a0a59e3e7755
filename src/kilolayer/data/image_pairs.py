"""Images with label images: the id of a class for each pixel, in a second array that is mapped from disk."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kilolayer.config import bounded
from kilolayer.data.augment import IGNORED
from kilolayer.data.cache_folder import MANIFEST, built, content_key
from kilolayer.data.image_batches import BatchesOfImages, batch_of, members_in_order
from kilolayer.data.image_decoding import decode, decode_ids, require_vision, size_of
from kilolayer.data.image_set import (
    FORM,
    HELD,
    KEPT,
    NOTHING,
    Faults,
    ImageSet,
    decoded,
    divided,
    image_files,
    mapped,
    nothing_found,
    write_part,
)
from kilolayer.data.image_source import ImageSource, parse_sources
from kilolayer.data.images import ImagesConfig, part_notes
from kilolayer.errors import InputError, OptionError, shown
from kilolayer.files.reading import read_json
from kilolayer.terminal import counted, say

IDS, COUNTS = "ids", "counts"
LEVELS = 256
MOST_CLASSES = 255
VOID_FIX = "if that id is a class, set images.void to one that is none; else correct the label images"


@dataclass(frozen=True, kw_only=True)
class ImagePairsConfig(ImagesConfig):
    """`[images]` of a segmentation run: images, and label images of the same names, whose levels are ids of classes."""

    train: str | None = None
    """Training images: a folder, or a .tar, .tar.gz or .tar.xz of it; `path.tar.xz:inner/folder` names one in an archive."""
    train_labels: str | None = None
    """Their label images, named like the images: grey images or palettes, whose levels are the ids of classes."""
    valid_labels: str | None = None
    """Label images of the validation images."""
    test_labels: str | None = None
    """Label images of the test images."""
    void: int = bounded(255, least=0, most=255)
    """The id of pixels that belong to no class: they are not learned and not scored."""
    classes: list[str] = field(default_factory=list)
    """Names of the classes, the first for id 0. Default: the ids up to the largest in the training images."""
    valid_share: float = bounded(0.0, least=0, below=1)
    """Share of the training images that is held out for validation."""
    rows: int = bounded(8, least=1, most=2**20)
    """Images per batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in ("train", "valid", "test"):
            images, labels = getattr(self, part), getattr(self, f"{part}_labels")
            if (images is None) != (labels is None):
                given, missing = (part, f"{part}_labels") if labels is None else (f"{part}_labels", part)
                raise OptionError(f"{given} is given without {missing}", fix=f"set images.{missing} too")
        if len(self.classes) > MOST_CLASSES:
            raise OptionError(f"there are {len(self.classes)} classes", fix=f"list at most {MOST_CLASSES}")

    @classmethod
    def sources(cls) -> tuple[str, ...]:
        return *super().sources(), "train_labels", "valid_labels", "test_labels"


class ImagePairs(ImageSet):
    """The images of one part of a run, and the ids of their pixels.

    void: the id of pixels that belong to no class. classes: their names; none: as many as there are ids in the folder.
    """

    labelled: ClassVar[str] = "pixel"

    def __init__(self, folder: Path, part: str, source: str, void: int, classes: Sequence[str] = ()) -> None:
        super().__init__(folder, part, source)
        height, width = self.pixels.shape[1:3]
        self.void = void
        self.ids: np.ndarray = mapped(folder / f"{part}.{IDS}", (len(self), height, width))
        self.id_counts: np.ndarray = mapped(folder / f"{part}.{COUNTS}", (len(self), LEVELS * 4)).view("<u4")
        """uint32 [images, 256]: how many pixels of each image have each id, as in the files."""
        self._content += str(read_json(folder / MANIFEST)["files"][f"{part}.{IDS}"]["sha256"])
        used = np.setdiff1d(_ids_of(folder), void)
        if not len(used):
            raise InputError(f"all pixels of the label images have the id of void, {void}", where=source, fix="set images.void")
        self.classes = tuple(classes) or tuple(str(number) for number in range(int(used[-1]) + 1))
        if len(self.classes) < 2:
            raise InputError(f"the label images have no other id than 0{self._beside_void()}", where=source, fix=VOID_FIX)
        if len(self.classes) > MOST_CLASSES:
            raise InputError("an id of 255 is not void, and is too large", where=source, fix="set images.void = 255")
        self._check_ids()

    @cached_property
    def digest(self) -> str:
        """A digest that identifies these images and what is learned of their pixels."""
        return hashlib.sha256(f"{self._content} {self.void} {len(self.classes)}".encode()).hexdigest()

    @cached_property
    def table(self) -> np.ndarray:
        """uint8 [256]: the id that is learned for each id in the files; 255 for void."""
        ids = np.arange(LEVELS)
        return np.where((ids < len(self.classes)) & (ids != self.void), ids, IGNORED).astype(np.uint8)

    @property
    def pixel_counts(self) -> np.ndarray:
        """int64 [classes]: how many pixels each class has."""
        counts = self.id_counts.sum(axis=0, dtype=np.int64)[: len(self.classes)]
        return np.where(np.arange(len(self.classes)) == self.void, 0, counts)

    @property
    def absent_classes(self) -> list[str]:
        counts = self.pixel_counts
        return [name for index, name in enumerate(self.classes) if not counts[index] and index != self.void]

    def check_classes(self) -> None:
        """Raise unless two classes have pixels, which learning needs."""
        if len(found := np.flatnonzero(self.pixel_counts)) < 2:
            raise InputError(
                f"no class but {shown(self.classes[found[0]])} has a pixel in the label images{self._beside_void()}",
                where=self.source,
                fix=VOID_FIX,
            )

    def _beside_void(self) -> str:
        """The share of pixels that have the id of void, in words; nothing if there are none."""
        counts = self.id_counts.sum(axis=0, dtype=np.int64)
        share = counts[self.void] / counts.sum()
        return f", and {share:.0%} of their pixels have the id of void, {self.void}" if share else ""

    def _check_ids(self) -> None:
        """Raise if a pixel has an id that is neither a class nor void."""
        ids = np.arange(LEVELS)
        wrong = self.id_counts[:, (ids >= len(self.classes)) & (ids != self.void)]
        if not len(found := np.flatnonzero(wrong.any(axis=1))):
            return
        others = sorted(set(np.flatnonzero(self.id_counts.any(axis=0)).tolist()) - {*range(len(self.classes)), self.void})
        names = [self.names[index] for index in found[:5]] + ["..."] * (len(found) > 5)
        pixels = counted(int(wrong.sum(dtype=np.int64)), "pixel")
        raise InputError(
            f"ids that are no class, {', '.join(map(str, others[:5]))}{', ...' if others[5:] else ''}: {pixels} in the label "
            f"images of {counted(len(found), 'image')}",
            where=f"{self.source}, {', '.join(names)}",
            fix=f"there are {len(self.classes)} classes, the first with id 0, and void, {self.void}: correct the label images, "
            "set images.void, or list all classes in images.classes",
        )

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """An image, uint8 [height, width, channels], and its ids, uint8 [height, width]; 255: no class."""
        return self.pixels[index], self.table[self.ids[index]]


@dataclass(frozen=True)
class PairParts:
    """All images of a segmentation run, with their label images. notes: what was left out or changed."""

    train: ImagePairs
    valid: ImagePairs | None
    test: ImagePairs | None
    notes: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of their ids."""
        return self.train.classes


def find_pairs(config: ImagePairsConfig, cache: Path) -> PairParts:
    """Decode the images and label images of all parts into arrays below `cache`, unless they are there, and check them."""
    require_vision()
    if config.train is None or config.train_labels is None:
        raise OptionError("no training images are given", where="images", fix="set images.train and images.train_labels")
    share = {"train": config.valid_share}
    sources = parse_sources({name: getattr(config, name) for name in config.sources()})
    folders = {
        part: prepared_pairs(sources[part], sources[f"{part}_labels"], config, cache, share.get(part, 0.0))
        for part in ("train", "valid", "test")
        if part in sources
    }
    train = ImagePairs(folders["train"], KEPT, str(sources["train"]), config.void, config.classes)
    train.check_classes()
    parts = {"train": train}
    if config.valid_share:
        parts["valid"] = ImagePairs(folders["train"], HELD, str(sources["train"]), config.void, train.classes)
    for part in folders.keys() - parts.keys():
        parts[part] = ImagePairs(folders[part], KEPT, str(sources[part]), config.void, train.classes)
    notes = tuple(note for name in ("train", "valid", "test") if name in parts for note in part_notes(name, parts[name], train))
    return PairParts(train, parts.get("valid"), parts.get("test"), notes)


def read_pairs(images: str, labels: str, config: ImagePairsConfig, cache: Path) -> ImagePairs:
    """Other images than the run's own, with label images of the same classes."""
    require_vision()
    sources = ImageSource.parse(images), ImageSource.parse(labels)
    part = ImagePairs(prepared_pairs(*sources, config, cache), KEPT, str(sources[0]), config.void, config.classes)
    for note in part_notes("test", part):
        say(note)
    return part


def prepared_pairs(images: ImageSource, labels: ImageSource, config: ImagesConfig, cache: Path, share: float = 0.0) -> Path:
    """The cached folder of decoded pairs; it is made unless it is there."""
    contents = [[source.identity(cache), source.inner] for source in (images, labels)]
    shape = (*config.sides, config.channels)

    def build(draft: Path) -> None:
        write_pairs(images, labels, draft, shape, share)

    return built(cache / f"pairs-{content_key(['pairs', FORM, contents, shape, share])}", build, trust_times=True)


@dataclass(frozen=True)
class _LabelImage:
    """A label image: its index among those decoded, its width and height, and why it cannot be used, if it cannot."""

    name: str
    index: int
    size: tuple[int, int] | None
    fault: str | None


def write_pairs(images: ImageSource, labels: ImageSource, folder: Path, shape: tuple[int, int, int], share: float) -> None:
    """Decode images and label images into the files of a folder, in the order of their names; count what has no partner."""
    faults, arrived, arrived_ids = Faults(), folder / "arrived", folder / "arrived_ids"
    known = _write_ids(labels, arrived_ids, *shape[:2], faults)
    names, left = [], set(known)

    def work(data: bytes) -> tuple[tuple[np.ndarray | None, list[str]], tuple[int, int] | None]:
        return decode(data, shape[2], shape[:2]), size_of(data)

    with open(arrived, "wb") as file:
        for name, ((pixels, reasons), size) in decoded(image_files(images, faults, set()), work, math.prod(shape)):
            label = known.get(stem_of(name))
            left.discard(stem_of(name))
            if pixels is not None and (fault := _fault(label, size)) is not None:
                pixels, reasons = None, [fault]
            for reason in reasons:
                faults.add(reason, name)
            if pixels is not None:
                file.write(pixels.data)
                names.append(name)
    for stem in sorted(left):
        faults.add("unpaired", known[stem].name)
    if not names:
        raise nothing_found(images, faults)
    _check_stems(names, images)
    order = [known[stem_of(name)].index for name in names]
    pixels = mapped(arrived, (len(names), *shape))
    ids = mapped(arrived_ids, (len(known), *shape[:2]))
    description = {"faults": faults.counts, "named": faults.names, "empty": []}
    for part, chosen in zip((KEPT, HELD), divided(names, share, by_class=False), strict=True):
        if chosen:
            write_part(folder, part, pixels, chosen, names, description if part == KEPT else NOTHING)
            _write_ids_of_part(folder, part, ids, [order[index] for index in chosen])
    del pixels, ids
    arrived.unlink()
    arrived_ids.unlink()


def _check_stems(names: Sequence[str], source: ImageSource) -> None:
    """Raise if two images differ in the endings of their names alone, by which they have one label image."""
    seen: dict[str, str] = {}
    for name in names:
        if (other := seen.setdefault(stem_of(name), name)) is not name:
            names_of_both = f"{source}, {other}" + (f" and {name}" if other != name else "")
            raise InputError("two images have the same name", where=names_of_both, fix="remove one of them")


def _write_ids(labels: ImageSource, path: Path, height: int, width: int, faults: Faults) -> dict[str, _LabelImage]:
    """Decode all label images into a file; each by the name without its ending. faults: to which other files are added."""
    known: dict[str, _LabelImage] = {}

    def work(data: bytes) -> tuple[tuple[np.ndarray | None, str | None], tuple[int, int] | None]:
        return decode_ids(data, height, width), size_of(data)

    empty = np.zeros((height, width), np.uint8)
    files = image_files(labels, faults, set(), "labels_other")
    with open(path, "wb") as file:
        for name, ((ids, fault), size) in decoded(files, work, height * width):
            if (stem := stem_of(name)) in known:
                raise InputError("two label images have the same name", where=f"{labels}, {name}", fix="remove one of them")
            known[stem] = _LabelImage(name, len(known), size, fault)
            file.write(np.ascontiguousarray(empty if ids is None else ids).data)
    if not known:
        raise nothing_found(labels, faults)
    return known


def _ids_of(folder: Path) -> np.ndarray:
    """The ids of all pixels in a folder, those held out too: which images are held out does not change the classes."""
    counts = [np.fromfile(path, "<u4").reshape(-1, LEVELS).any(axis=0) for path in folder.glob(f"*.{COUNTS}")]
    return np.flatnonzero(np.any(counts, axis=0))


def _write_ids_of_part(folder: Path, part: str, ids: np.ndarray, order: Sequence[int]) -> None:
    with open(folder / f"{part}.{IDS}", "wb") as file, open(folder / f"{part}.{COUNTS}", "wb") as counts:
        for index in order:
            file.write(ids[index].data)
            counts.write(np.bincount(ids[index].ravel(), minlength=LEVELS).astype("<u4").data)


def _fault(label: _LabelImage | None, size: tuple[int, int] | None) -> str | None:
    """Why an image is left out because of its label image."""
    if label is None:
        return "unlabelled"
    return label.fault or ("sizes" if label.size != size else None)


def stem_of(name: str) -> str:
    """The name of an image below its source, without its ending, by which images and label images are paired."""
    return str(PurePosixPath(name).with_suffix(""))


@dataclass(frozen=True)
class PairBatch:
    """Images and label images. The last batch of an epoch is filled up with black images, which do not count."""

    pixels: Tensor
    """uint8 [rows, channels, height, width]."""
    ids: Tensor
    """uint8 [rows, height, width]: classes; 255 where there is none, and in rows that fill up the batch."""
    keys: Tensor
    """int64 [rows, 2]: the index of the image in its set, and the epoch."""
    tokens: int
    """The number of pixels that have a class, at least 1."""

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Pixels, ids and keys."""
        return self.pixels, self.ids, self.keys


class PairBatches(BatchesOfImages[PairBatch]):
    """An endless iterator over batches of `rows` images with label images."""

    def __init__(self, images: ImagePairs, rows: int, seed: int = 0) -> None:
        super().__init__(images, rows, seed)
        self.pairs = images

    def batch(self, members: np.ndarray) -> PairBatch:
        return pairs_of(self.pairs, members, self.rows, self.epoch)


def pairs_of(images: ImagePairs, members: np.ndarray, rows: int, epoch: int = 0) -> PairBatch:
    """The images with indices `members`, int64 [n], and their label images, filled up to `rows`."""
    plain = batch_of(images, members, rows, epoch)
    ids = np.full((rows, *images.ids.shape[1:]), IGNORED, np.uint8)
    ids[: len(members)] = images.table[images.ids[members]]
    return PairBatch(plain.pixels, torch.from_numpy(ids), plain.keys, max(1, int((ids != IGNORED).sum())))


def pairs_in_order(images: ImagePairs, rows: int, most: int | None = None) -> Iterator[tuple[np.ndarray, PairBatch]]:
    """Every image once, or `most` of them, in order: the indices of each batch, and the batch."""
    for members in members_in_order(images, rows, most):
        yield members, pairs_of(images, members, min(rows, len(images)))
