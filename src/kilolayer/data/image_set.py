"""Decoded images of one size, in an array that is mapped from disk."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from kilolayer.data.cache_folder import MANIFEST, built, content_key
from kilolayer.data.image_decoding import REASONS, SUFFIXES, decode, is_image_name
from kilolayer.data.image_source import Entry, ImageSource
from kilolayer.errors import InputError
from kilolayer.files.reading import read_json
from kilolayer.terminal import counted

FORM = 2
"""Raised when the files of a cached set, or the way images are decoded, change."""
LARGEST_DESCRIPTION = 1 << 30
AT_ONCE, BYTES_AT_ONCE = 64, 1 << 24
"""Images that a thread decodes before it is given others, and their bytes."""
MOST_NAMED = 5
"""Names that are listed for each reason."""
DIGEST_BYTES = 16
PIXELS, DIGESTS, DESCRIPTION = "pixels", "digests", "json"
KEPT, HELD = "kept", "held"
"""The two parts of a set of which a share is held out."""
NOTHING: dict[str, Any] = {"faults": {}, "named": {}, "empty": []}
Result = TypeVar("Result")


@dataclass(frozen=True)
class Faults:
    """What was left out or changed, by `REASONS`: how many images, and the names of the first of them."""

    counts: Counter[str] = field(default_factory=Counter)
    names: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, name: str) -> None:
        """Count one more."""
        self.counts[reason] += 1
        if len(named := self.names.setdefault(reason, [])) < MOST_NAMED:
            named.append(name)

    def lines(self) -> list[str]:
        """A sentence for each reason, for the log."""
        return [
            f"{count:,} {REASONS[reason]} ({', '.join(self.names[reason])}{', ...' if count > MOST_NAMED else ''})"
            for reason in REASONS
            if (count := self.counts[reason])
        ]


class ImageSet:
    """The images of one part of a run.

    folder, part: a cached folder, and whether these are its images that were kept or those held out. classes: in order, for
    images in folders by class; none: the images have no labels. source: where the images came from, for messages.
    """

    labelled: ClassVar[str] = "image"
    """What a class belongs to."""

    def __init__(self, folder: Path, part: str, source: str, classes: Sequence[str] = ()) -> None:
        self.source, self.classes = source, tuple(classes)
        try:
            description = read_json(folder / f"{part}.{DESCRIPTION}", LARGEST_DESCRIPTION)
            self.names: list[str] = description["names"]
            self._faults = Faults(Counter(description["faults"]), description["named"])
            self.empty_folders: list[str] = description["empty"]
            self.pixels: np.ndarray = mapped(folder / f"{part}.{PIXELS}", tuple(description["shape"]))
            self.digests: np.ndarray = mapped(folder / f"{part}.{DIGESTS}", (len(self.names), DIGEST_BYTES))
            self._content = str(read_json(folder / MANIFEST)["files"][f"{part}.{PIXELS}"]["sha256"])
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise InputError(
                f"the cached images are damaged: {error}", where=str(folder), fix="delete the folder; it will be created again"
            ) from None
        self.labels = self._labels() if self.classes else None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def faults(self) -> dict[str, int]:
        """How many images were left out or changed, by reason (`image_decoding.REASONS`)."""
        return dict(self._faults.counts)

    @property
    def notes(self) -> list[str]:
        """What was left out or changed, in sentences with names."""
        return self._faults.lines()

    @cached_property
    def digest(self) -> str:
        """A digest that identifies these images and their labels, wherever they are stored."""
        labels = b"" if self.labels is None else self.labels.tobytes()
        return hashlib.sha256(self._content.encode() + labels).hexdigest()

    @property
    def title(self) -> str:
        """What was read, for the log."""
        height, width = self.pixels.shape[1:3]
        classes = f" of {counted(len(self.classes), 'class')}" if self.classes else ""
        return f"{counted(len(self), 'image')}{classes}, {height}x{width} pixels"

    @property
    def absent_classes(self) -> list[str]:
        """The classes to which nothing in this part belongs."""
        present = set() if self.labels is None else set(self.labels.tolist())
        return [name for index, name in enumerate(self.classes) if index not in present]

    def equal_images(self, other: ImageSet) -> list[str]:
        """The names of images of this set whose pixels another set has too."""
        known = set(map(bytes, other.digests))
        return [name for name, digest in zip(self.names, map(bytes, self.digests), strict=True) if digest in known]

    def _labels(self) -> np.ndarray:
        """int64 [images]: the index of each image's class, the first folder of its name."""
        index = {name: number for number, name in enumerate(self.classes)}
        for name in self.names:
            if class_of(name) not in index:
                raise InputError(
                    f"there is no class {class_of(name)!r}" if class_of(name) else "an image is in no folder of a class",
                    where=f"{self.source}, {name}",
                    fix=f"classes are the folders of the training images: {', '.join(self.classes[:20])}; move or remove the "
                    "others, or list all in images.classes",
                )
        return np.array([index[class_of(name)] for name in self.names], np.int64)


def class_of(name: str) -> str:
    """The class of an image by its name below the source: its first folder; "" if it is in none."""
    return name.partition("/")[0] if "/" in name else ""


def prepared_images(
    source: ImageSource, shape: tuple[int, int, int], cache: Path, share: float = 0.0, *, labelled: bool = True
) -> Path:
    """The cached folder of the decoded images of a source; it is made unless it is there.

    shape: height, width and channels. share: of all images, held out; labelled: of those of each class.
    """
    by_class = labelled and share > 0
    settings = ["images", FORM, source.identity(cache), source.inner, *shape, share, by_class]

    def build(draft: Path) -> None:
        write_images(source, draft, shape, share, by_class=by_class)

    return built(cache / f"images-{content_key(settings)}", build, trust_times=True)


def write_images(source: ImageSource, folder: Path, shape: tuple[int, int, int], share: float, *, by_class: bool) -> None:
    """Decode all images of a source into the files of a folder, in the order of their names."""
    faults, names, folders = Faults(), [], set()
    arrived = folder / "arrived"
    with open(arrived, "wb") as file:
        files = image_files(source, faults, folders)
        for name, (pixels, reasons) in decoded(files, lambda data: decode(data, shape[2], shape[:2]), math.prod(shape)):
            for reason in reasons:
                faults.add(reason, name)
            if pixels is not None:
                file.write(pixels.data)
                names.append(name)
    if not names:
        raise nothing_found(source, faults)
    check_names(names, source)
    array = mapped(arrived, (len(names), *shape))
    kept, held = divided(names, share, by_class=by_class)
    description = {
        "faults": faults.counts,
        "named": faults.names,
        "empty": sorted(folders - {class_of(name) for name in names}),
    }
    write_part(folder, KEPT, array, kept, names, description)
    if share:
        write_part(folder, HELD, array, held, names, NOTHING)
    del array
    arrived.unlink()


def write_part(
    folder: Path, part: str, array: np.ndarray, order: Sequence[int], names: Sequence[str], description: dict[str, Any]
) -> None:
    """Write the images with the indices `order` as one part of a folder."""
    with open(folder / f"{part}.{PIXELS}", "wb") as pixels, open(folder / f"{part}.{DIGESTS}", "wb") as digests:
        for index in order:
            pixels.write(array[index].data)
            digests.write(hashlib.blake2b(array[index].data, digest_size=DIGEST_BYTES).digest())
    own = {"names": [names[index] for index in order], "shape": [len(order), *array.shape[1:]]}
    (folder / f"{part}.{DESCRIPTION}").write_text(json.dumps(own | description))


def divided(names: Sequence[str], share: float, *, by_class: bool) -> tuple[list[int], list[int]]:
    """The indices of the images kept, and of those held out: a share, drawn by the names alone; by_class: of each class.

    Both are in the order of the names.
    """
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        groups.setdefault(class_of(name) if by_class else "", []).append(index)
    drawn = [hashlib.sha256(name.encode(errors="surrogateescape")).digest() if share else b"" for name in names]
    held = {index for group in groups.values() for index in sorted(group, key=drawn.__getitem__)[: round(share * len(group))]}
    if share and not 0 < len(held) < len(names):
        raise InputError(
            f"a share of {share:g} of {_sizes(groups, by_class)} leaves none for validation or training",
            where="images.valid_share",
            fix="set another share, or name images.valid",
        )
    order = sorted(range(len(names)), key=names.__getitem__)
    return [index for index in order if index not in held], [index for index in order if index in held]


def _sizes(groups: Mapping[str, Sequence[int]], by_class: bool) -> str:
    """The sizes of what is divided, in words."""
    sizes = [len(group) for group in groups.values()]
    least, most = min(sizes), max(sizes)
    if not by_class:
        return f"{most:,} images"
    return f"each class, with {least:,}{f' to {most:,}' if most > least else ''} images,"


def nothing_found(source: ImageSource, faults: Faults) -> InputError:
    """The error for a source without any image that can be used."""
    return InputError(
        ": ".join(["there is no image here", *(["; ".join(faults.lines())] if faults.counts else [])]),
        where=str(source),
        fix=f"name a folder with files that end in {', '.join(SUFFIXES[:3])}, ..., or an archive of one",
    )


def decoded(entries: Iterable[Entry], decode: Callable[[bytes], Result], size: int) -> Iterator[tuple[str, Result]]:
    """The name of each file and what is decoded from it, by several threads, in order.

    size: bytes of a decoded file; few are in memory at once.
    """
    threads = max(1, min(8, os.cpu_count() or 1))

    def work(chunk: list[Entry]) -> list[tuple[str, Result]]:
        return [(entry.name, decode(entry.data or b"")) for entry in chunk]

    waiting: deque[Future[list[tuple[str, Result]]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for chunk in _chunks(entries, max(1, min(AT_ONCE, BYTES_AT_ONCE // size))):
            waiting.append(pool.submit(work, chunk))
            if len(waiting) > 2 * threads:
                yield from waiting.popleft().result()
        for future in waiting:
            yield from future.result()


def _chunks(entries: Iterable[Entry], most: int) -> Iterator[list[Entry]]:
    chunk, size = [], 0
    for entry in entries:
        chunk.append(entry)
        size += len(entry.data or b"")
        if len(chunk) >= most or size >= BYTES_AT_ONCE:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def image_files(source: ImageSource, faults: Faults, folders: set[str], other: str = "other") -> Iterator[Entry]:
    """The image files of a source, by their names; others are counted, as `other`. Adds each first folder to `folders`."""
    for entry in source.entries():
        if above := class_of(entry.name):
            folders.add(above)
        if entry.data is None:
            continue
        if not is_image_name(entry.name):
            faults.add(other, entry.name)
            continue
        yield entry


def check_names(names: Sequence[str], source: ImageSource) -> None:
    """Raise if a name occurs twice, as it may in an archive."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InputError("the archive has this image twice", where=f"{source}, {name}", fix="make the archive again")
        seen.add(name)


def mapped(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """A file as an array of bytes that is read when it is needed."""
    if path.stat().st_size != math.prod(shape):
        raise ValueError(f"{path.name} has another size")
    return np.memmap(path, np.uint8, "r", shape=shape)
