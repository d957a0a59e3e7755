"""The small values of a checkpoint, as a run expects them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kilolayer.errors import InputError


def fitted(saved: Any, like: Any, path: Path, key: str = "") -> Any:
    """Of what a checkpoint holds, the values that `like` has too, in the same form; else an error that names file and key.

    A number stands for a number, a whole one for a whole one, None in `like` for a number or None; lists are of equal lengths.
    """
    if isinstance(like, dict) and isinstance(saved, dict):
        if absent := sorted(like.keys() - saved.keys()):
            raise _misfit(f"{'.'.join(filter(None, (key, absent[0])))} is missing", path)
        return {name: fitted(saved[name], each, path, ".".join(filter(None, (key, name)))) for name, each in like.items()}
    if isinstance(like, list) and isinstance(saved, list) and len(like) == len(saved):
        return [fitted(saved[place], each, path, f"{key}[{place}]") for place, each in enumerate(like)]
    if isinstance(like, dict | list) or not _fits(saved, like):
        raise _misfit(f"{key or 'it'} is {_form(saved)}, not {_form(like)}", path)
    return saved


def _fits(value: Any, like: Any) -> bool:
    if isinstance(like, bool | str):
        return type(value) is type(like)
    if isinstance(value, int) and (isinstance(value, bool) or abs(value) >= 2**63):
        return False
    if value is None:
        return like is None
    return isinstance(value, int) or (isinstance(value, float) and not isinstance(like, int))


def _misfit(what: str, path: Path) -> InputError:
    return InputError(
        f"the saved state does not fit the run: {what}",
        where=str(path),
        fix="use a checkpoint of this run, or move this one away to go on from the one before",
    )


def _form(value: Any) -> str:
    match value:
        case None:
            return "nothing"
        case dict():
            return "a table"
        case list():
            return f"a list of {len(value)}"
        case bool():
            return "a truth value"
        case str():
            return "a text"
        case int():
            return "a whole number" if abs(value) < 2**63 else "too large a number"
        case _:
            return "a number"
