"""Where image files come from: a folder, or a tar archive that is read without being unpacked."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import re
import tarfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Literal

from kilolayer.data.cache_folder import built, content_key, sha256
from kilolayer.errors import InputError, nearest
from kilolayer.files.paths import did_you_mean, kind_of, resolve, storable
from kilolayer.files.reading import open_regular, read_bytes, read_json, unreadable

ARCHIVE = re.compile(r"^(?P<path>.*\.(?:tar|tar\.gz|tgz|tar\.xz|txz))(?::(?P<inner>.*))?$", re.IGNORECASE | re.DOTALL)
LARGEST = 1 << 28
"""Maximum size of an image file, in bytes."""
MOST_KEPT = 1 << 28
"""Maximum size of an archive that is kept in memory while several folders of it are read, in bytes."""
DEEPEST = 32
"""Maximum nesting of folders: a symbolic link can make a loop."""
SETTLED_SECONDS = 2.0
"""A file that changed this recently may change again without another time stamp."""
CONTENT = "content.json"


@dataclass(frozen=True)
class Entry:
    """A file below a source. data: its bytes; None for a folder, whose name ends in "/"."""

    name: str
    data: bytes | None


@dataclass(frozen=True)
class ImageSource:
    """A folder, or a folder `inner` in an archive ("": all of it)."""

    path: Path
    inner: str = ""
    kept: list[Entry] | None = field(default=None, compare=False, repr=False)
    """What was read of the archive, shared by all sources in it; None if it is not kept in memory."""

    @classmethod
    def parse(cls, text: str) -> ImageSource:
        """The source that a configuration names: `folder`, `images.tar.xz` or `images.tar.xz:inner/folder`."""
        found = ARCHIVE.match(text)
        if found is None or kind_of(Path(text)) == "folder":
            return cls(Path(text))
        return cls(Path(found["path"]), "/".join(_clean(found["inner"] or "")))

    def __str__(self) -> str:
        return f"{self.path}:{self.inner}" if self.inner else str(self.path)

    @property
    def is_archive(self) -> bool:
        """Whether the name is that of an archive."""
        return ARCHIVE.match(str(self.path)) is not None

    def absolute(self) -> str:
        """The text that names this source wherever the command is started."""
        return str(ImageSource(storable(self.path), self.inner))

    def entries(self) -> Iterator[Entry]:
        """Every file and folder below the source: those of a folder in the order of their names, of an archive in its own."""
        yield from self._of_folder() if self._kind() == "folder" else self._of_archive()

    def identity(self, cache: Path) -> str:
        """A digest of the content. Files whose size and time stamps are as they were the last time are not read again."""
        if self._kind() == "folder":
            found = dict(_walk(self.path))
            folders = [name for name in found if name.endswith("/")]
            paths = {name: path for name, path in found.items() if not name.endswith("/")}
        else:
            folders, paths = [], {"": self.path}
        try:
            stats = {name: os.stat(path) for name, path in paths.items()}
        except OSError as error:
            raise unreadable(error.filename or self.path, error) from None
        stamps = [[name, each.st_size, each.st_mtime_ns, each.st_ctime_ns, each.st_ino] for name, each in stats.items()]

        def digest() -> str:
            digests = [(name, sha256(path)) for name, path in paths.items()]
            return hashlib.sha256(json.dumps([folders, digests]).encode()).hexdigest()

        def write(draft: Path) -> None:
            (draft / CONTENT).write_text(json.dumps(digest()))

        if max((each.st_mtime for each in stats.values()), default=0.0) > time.time() - SETTLED_SECONDS:
            return digest()
        key = content_key(["content 1", str(resolve(self.path)), folders, stamps])
        return read_json(built(cache / f"content-{key}", write) / CONTENT, 1 << 10)

    def _kind(self) -> Literal["folder", "archive"]:
        kind = kind_of(self.path)
        if kind is None:
            fix = f"check the path{did_you_mean(self.path)}"
            raise InputError("there is no such folder or archive", where=str(self.path), fix=fix)
        if kind != "folder" and not self.is_archive:
            fix = "name a folder, or a .tar, .tar.gz or .tar.xz"
            raise InputError("this is neither a folder nor an archive", where=str(self.path), fix=fix)
        return "folder" if kind == "folder" else "archive"

    def _of_folder(self) -> Iterator[Entry]:
        for name, path in _walk(self.path):
            yield Entry(name, None if name.endswith("/") else read_bytes(path, LARGEST))

    def _of_archive(self) -> Iterator[Entry]:
        above = self.inner.split("/") if self.inner else []
        below: dict[str, list[str] | None] = {}  # for each folder, its parts below the inner one; None if it is elsewhere
        for entry in self.kept or self._members():
            folder, _, last = entry.name.removesuffix("/").rpartition("/")
            if folder not in below:
                parts = _clean(folder)
                below[folder] = parts[len(above) :] if parts[: len(above)] == above else None
            if (inside := below[folder]) is not None and last not in ("", "."):
                yield Entry("/".join([*inside, last]) + "/" * (entry.data is None), entry.data)
        if all(parts is None for parts in below.values()):
            parts_of = [_clean(folder) for folder in below]
            folders = {"/".join(parts[:depth]) for parts in parts_of for depth in range(1, len(parts) + 1)}
            close = nearest(self.inner, folders) if folders else None
            first = sorted(folders, key=lambda folder: (folder.count("/"), folder))[:20]
            raise InputError(
                f"the archive has no folder {self.inner!r}" + (f"; did you mean {close!r}?" if close else ""),
                where=str(self.path),
                fix=f"its folders: {', '.join(first) or 'none'}",
            )

    def _members(self) -> Iterator[Entry]:
        """Everything in the archive; remembered if it is to be kept."""
        read: list[Entry] = []
        try:
            # As a stream: going back in a compressed archive means to decompress it again from its beginning.
            with open_regular(self.path) as file, tarfile.open(fileobj=file, mode="r|*") as archive:
                for member in archive:
                    stream = archive.extractfile(member) if member.isfile() and member.size <= LARGEST else None
                    # A link, a device or a huge file is empty here, and is counted as no image.
                    data = stream.read() if stream is not None else b""
                    entry = Entry(f"{member.name}/", None) if member.isdir() else Entry(member.name, data)
                    yield entry
                    if self.kept is not None:
                        read.append(entry)
        except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError) as error:
            raise InputError(
                f"the archive is damaged: {error}", where=str(self.path), fix="download or make it again"
            ) from None
        if self.kept is not None:
            self.kept.extend(read)


def parse_sources(texts: Mapping[str, str | None]) -> dict[str, ImageSource]:
    """The sources that a configuration names, by their names. An archive that several of them name is decompressed once."""
    found = {name: ImageSource.parse(text) for name, text in texts.items() if text is not None}
    paths = Counter(source.path for source in found.values())
    kept: dict[Path, list[Entry]] = {
        path: [] for path, uses in paths.items() if uses > 1 and kind_of(path) == "file" and path.stat().st_size <= MOST_KEPT
    }
    return {name: replace(source, kept=kept.get(source.path)) for name, source in found.items()}


def _clean(name: str) -> list[str]:
    """The parts of a path in an archive, without "." and slashes at its ends."""
    return [part for part in PurePosixPath(name).parts if part not in (".", "/")]


def _walk(folder: Path, above: str = "", depth: int = 0) -> Iterator[tuple[str, Path]]:
    """The name below the first folder, and the path, of every file and folder, sorted; folders end in "/"."""
    if depth > DEEPEST:
        raise InputError(
            "folders are nested too deeply", where=str(folder), fix="a symbolic link may point above itself: remove it"
        )
    try:
        found = sorted((entry.name, entry.is_dir()) for entry in os.scandir(folder))
    except OSError as error:
        raise unreadable(folder, error) from None
    for name, is_folder in found:
        if is_folder:
            yield f"{above}{name}/", folder / name
            yield from _walk(folder / name, f"{above}{name}/", depth + 1)
        else:
            yield f"{above}{name}", folder / name
