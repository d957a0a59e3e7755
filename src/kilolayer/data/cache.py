"""Folders that are built once and verified whenever they are used again: token files, vocabularies, split tables.

A folder is written beside its place, sealed by a manifest and renamed: it is there whole, or not at all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kilolayer.errors import InputError

MANIFEST = "manifest.json"
log = logging.getLogger(__name__)


def content_key(settings: Any, files: Iterable[Path] = ()) -> str:
    """A name for what is made from the bytes of `files` under `settings` (plain values)."""
    parts = [json.dumps(settings, sort_keys=True), *(sha256(path) for path in files)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise InputError("the file cannot be read", where=str(path), fix=str(error.strerror or error).lower()) from None


def built(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, filled by `build(empty folder)` unless it is already there and undamaged."""
    if folder.exists():
        fault = damage(folder)
        if fault is None:
            return folder
        log.warning("%s is damaged (%s): building it again", folder, fault)
    draft = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
    try:
        draft.mkdir(parents=True)
        build(draft)
        _seal(draft)
        _move(draft, folder)
    except OSError as error:
        need = "free some space there, or choose another cache folder"
        raise InputError(f"the cache cannot be written: {error.strerror or error}", where=str(folder), fix=need) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def damage(folder: Path) -> str | None:
    """What is wrong with a sealed folder; None where every file is as it was written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        expected = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is missing or unreadable"
    names = {path.name for path in folder.iterdir()} - {MANIFEST}
    if names != set(expected):
        return f"its files are not those of {MANIFEST}"
    for name, (size, digest) in expected.items():
        if (folder / name).stat().st_size != size:
            return f"{name} has another size"
        if sha256(folder / name) != digest:
            return f"{name} has another SHA-256"
    return None


def _seal(draft: Path) -> None:
    files = {}
    for path in sorted(draft.iterdir()):
        _sync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    (draft / MANIFEST).write_text(json.dumps({"files": files}, indent=1))
    _sync(draft / MANIFEST)
    _sync(draft)


def _move(draft: Path, folder: Path) -> None:
    """Put the draft in its place; where another process was quicker, its folder stays."""
    if folder.exists() and damage(folder) is not None:
        damaged = draft.with_name(f"{draft.name}.damaged")
        folder.rename(damaged)
        if damaged.is_dir():
            shutil.rmtree(damaged)
        else:
            damaged.unlink()
    try:
        draft.rename(folder)
    except OSError:
        if damage(folder) is not None:
            raise
    _sync(folder.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
