"""The choice between the plain runtime and the fast one: the only module that imports `speed/`."""

from __future__ import annotations

import importlib.util

from kilolayer.runtime.runtime import PLAIN, Runtime


def choose_runtime() -> Runtime:
    """The runtime of a run: the fast one, or the plain one in a copy of the package without `speed/`."""
    if importlib.util.find_spec("kilolayer.speed") is None:
        return PLAIN
    from kilolayer.speed.runtime import FAST

    return FAST
