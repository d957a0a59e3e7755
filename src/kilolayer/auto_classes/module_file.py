"""The module that is saved next to a model, through which `trust_remote_code=True` finds the classes of this package."""

from __future__ import annotations

from pathlib import Path

from kilolayer.files.reading import read_bytes
from kilolayer.files.writing import write

MODULE = "modeling_kilolayer"


def write_module(folder: Path) -> None:
    """Write the module to a folder."""
    name = f"{MODULE}.py"
    write(folder / name, read_bytes(Path(__file__).with_name(name)))


def class_in_module(name: str) -> str:
    """The reference to a class in `auto_map`."""
    return f"{MODULE}.{name}"
