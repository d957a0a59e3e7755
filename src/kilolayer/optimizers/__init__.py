"""Optimizers: one file per update rule in `rules/`, the state that all of them share, and parameter groups.

What an optimizer of your own is written with is resolved on first use, so that importing this package imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kilolayer.config import bounded as bounded
from kilolayer.optimizers.registry import find, get, names, register

if TYPE_CHECKING:
    from kilolayer.optimizers.base import Part as Part
    from kilolayer.optimizers.base import UpdateRule as UpdateRule

__all__ = ["Part", "UpdateRule", "bounded", "find", "get", "names", "register"]


def __getattr__(name: str) -> Any:
    if name in ("Part", "UpdateRule"):
        return getattr(importlib.import_module("kilolayer.optimizers.base"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
