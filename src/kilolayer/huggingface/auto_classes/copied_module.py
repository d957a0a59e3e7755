"""What `module_file` is in the module that it writes: there, the module to be saved next to a model is that module itself."""

from __future__ import annotations

import shutil
from pathlib import Path

from kilolayer.recipes.base import Recipe


def write_module(folder: Path, name: str, recipe: type[Recipe], norm: str) -> None:
    """Write this module to a folder."""
    shutil.copyfile(__file__, folder / name)
