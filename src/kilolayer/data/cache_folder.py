"""Cached folders that are built once and verified on every use: token files, vocabularies, split tables.

A folder is written as a hidden draft next to its destination, sealed with a manifest and then renamed, so it is either complete
or absent. The process that writes a draft holds a lock on a file next to it. The operating system releases the lock when the
process dies, so the next build can tell which drafts are abandoned and remove them. A draft that takes long to write may be
resumable: it has a fixed name, and the next build continues it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kilolayer.data.file_facts import known
from kilolayer.errors import InputError, WriteError, file_fault
from kilolayer.files.paths import kind_of
from kilolayer.files.reading import open_regular, read_json
from kilolayer.files.writing import sync

MANIFEST = "manifest.json"
LARGEST_MANIFEST = 1 << 24
LOCK = ".lock"
UNFINISHED = ".unfinished"
KEPT_SECONDS = 30 * 24 * 3600
"""How long a resumable draft waits to be continued before it counts as abandoned."""
log = logging.getLogger(__name__)


def content_key(settings: Any, files: Iterable[Path] = (), cache: Path | None = None) -> str:
    """A cache key for what is made from the bytes of `files` under `settings` (plain values).

    cache: where the digests of large files are kept, which are then not read again until they change.
    """
    parts = [json.dumps(settings, sort_keys=True), *(known(path, "sha256", sha256, cache) for path in files)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open_regular(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def built(folder: Path, build: Callable[[Path], None], *, trust_times: bool = False, resumable: bool = False) -> Path:
    """`folder`; unless it already exists undamaged, it is first filled by calling `build` with an empty folder.

    trust_times: files that have not been modified since they were written, by their time stamps, are not read. resumable: if a
    process that called `build` was killed or interrupted, the next call is given the folder as it left it.
    """
    if kind_of(folder) is not None:
        fault = damage(folder, trust_times=trust_times)
        if fault is None:
            return folder
        log.warning("%s is damaged (%s): building it again", folder, fault)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        with _resumable_draft(folder) if resumable else _locked_draft(folder) as draft:
            build(draft)
            _seal(draft)
            _move(draft, folder)
    except OSError as error:
        reason, fix = file_fault(error)
        raise WriteError(
            f"the cache cannot be written: {reason}",
            where=str(folder),
            fix=f"{fix}; KILOLAYER_CACHE sets another folder",
        ) from None
    return folder


def damage(folder: Path, *, trust_times: bool = False) -> str | None:
    """What is wrong with a sealed folder; None if every file is as it was written."""
    try:
        manifest = read_json(folder / MANIFEST, LARGEST_MANIFEST)
        expected = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
        times = {name: entry.get("modified_ns") for name, entry in manifest["files"].items() if trust_times}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return f"{MANIFEST} is missing or unreadable"
    try:
        found = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(folder) if entry.name != MANIFEST}
        if found.keys() != expected.keys():
            return f"its files are not those of {MANIFEST}"
        for name, (size, digest) in expected.items():
            if not stat.S_ISREG(found[name].st_mode):
                return f"{name} is not a regular file"
            if found[name].st_size != size:
                return f"{name} has another size"
            if times.get(name) != found[name].st_mtime_ns and sha256(folder / name) != digest:
                return f"{name} has another SHA-256"
    except (OSError, InputError) as error:
        return f"it cannot be read: {error}"
    return None


@contextmanager
def _locked_draft(folder: Path) -> Iterator[Path]:
    """A new empty folder next to `folder`, locked by this process and removed on exit."""
    draft = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
    with open(f"{draft}{LOCK}", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.fstat(lock.fileno()).st_nlink:  # removed as abandoned between its creation and its lock
            with _locked_draft(folder) as another:
                yield another
            return
        try:
            draft.mkdir()
            yield draft
        finally:
            _remove_draft(draft)


@contextmanager
def _resumable_draft(folder: Path) -> Iterator[Path]:
    """The draft of `folder` that a process left when it was killed, or a new one; locked by this process.

    It is removed on exit, also if there is something wrong with what was read or the disk is full, but not on a signal. While
    another process writes it, a second process writes a draft of its own.
    """
    draft = folder.parent / f".{folder.name}{UNFINISHED}"
    with open(f"{draft}{LOCK}", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = bool(os.fstat(lock.fileno()).st_nlink)  # unless it was removed between its creation and its lock
        except BlockingIOError:
            is_ours = False
        if not is_ours:
            with _locked_draft(folder) as another:
                yield another
            return
        os.utime(lock.fileno())
        draft.mkdir(exist_ok=True)
        try:
            yield draft
        except (InputError, WriteError, OSError):
            _remove_draft(draft)
            raise
        _remove_draft(draft)


def _remove_abandoned(cache: Path) -> None:
    """Remove the drafts of dead processes: those whose lock is free, and resumable ones only if they are old."""
    for path in cache.glob(f".*{LOCK}"):
        try:
            if path.name.endswith(UNFINISHED + LOCK) and time.time() - path.stat().st_mtime < KEPT_SECONDS:
                continue
            # NFS can lock only files that are open for writing.
            lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_draft(path.with_suffix(""))
            finally:
                os.close(lock)
        except OSError:
            continue  # its builder is alive, another process has just removed it, or it belongs to another user


def _remove_draft(draft: Path) -> None:
    """Remove a draft. The lock file goes last, so that an interrupted removal is still recognized as abandoned."""
    for path in (draft, _damaged(draft)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    Path(f"{draft}{LOCK}").unlink(missing_ok=True)


def _damaged(draft: Path) -> Path:
    """The path next to the draft to which a damaged folder is moved."""
    return draft.with_name(f"{draft.name}.damaged")


def _seal(draft: Path) -> None:
    files = {}
    for path in sorted(draft.iterdir()):
        sync(path)
        written = path.stat()
        files[path.name] = {"bytes": written.st_size, "sha256": sha256(path), "modified_ns": written.st_mtime_ns}
    (draft / MANIFEST).write_text(json.dumps({"files": files}, indent=1))
    sync(draft / MANIFEST)
    sync(draft)


def _move(draft: Path, folder: Path) -> None:
    """Move the draft to its destination; if another process was faster, keep that process's folder."""
    if os.path.lexists(folder) and damage(folder) is not None:
        folder.rename(_damaged(draft))
    try:
        draft.rename(folder)
    except OSError:
        if damage(folder) is not None:
            raise
    sync(folder.parent)
