"""Kilolayer: build, train, diagnose and ship very deep and very sparse Transformers.

The public names are the imports in `__init__.pyi`. They are resolved on first use, so that importing this package imports no
torch.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from kilolayer.version import VERSION

__version__ = VERSION

_IMPORTS = re.findall(r"^from (\S+) import (\w+) as \w+$", Path(__file__).with_suffix(".pyi").read_text("utf-8"), re.MULTILINE)
_HOMES: dict[str, str] = {name: module for module, name in _IMPORTS}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kilolayer' has no attribute {name!r}; it has: {', '.join(__all__)}")
    if _HOMES[name] == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
