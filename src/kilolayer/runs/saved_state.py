"""Checks that the small values stored in a checkpoint have the expected form."""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import Any, get_args

from kilolayer.errors import InputError

NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "nothing", dict: "a table"}


def form_of(value: Any) -> Any:
    """The form of a value: tables and lists are kept, and each value in them is replaced by its type. For `fitted`."""
    if isinstance(value, dict):
        return {name: form_of(each) for name, each in value.items()}
    return [form_of(each) for each in value] if isinstance(value, list) else type(value)


def fitted(saved: Any, form: Any, path: Path, key: str = "") -> Any:
    """The values that `form` names, from what the file `path` of a checkpoint holds; a misfit raises, naming file and key.

    form: tables by name, lists of equal length, and types such as `int` or `float | None`. An int is accepted as a float.
    """
    if isinstance(form, dict) and isinstance(saved, dict):
        if absent := sorted(form.keys() - saved.keys()):
            raise _misfit(f"{'.'.join(filter(None, (key, absent[0])))} is missing", path)
        return {name: fitted(saved[name], each, path, ".".join(filter(None, (key, name)))) for name, each in form.items()}
    if isinstance(form, list) and isinstance(saved, list) and len(form) == len(saved):
        return [fitted(saved[index], each, path, f"{key}[{index}]") for index, each in enumerate(form)]
    kinds = () if isinstance(form, dict | list) else get_args(form) or (form,)
    if not any(_is_one(saved, kind) for kind in kinds):
        wanted = " or ".join(_named(kind) for kind in kinds or [form])
        raise _misfit(f"{key or 'it'} is {_named(form_of(saved))}, not {wanted}", path)
    return saved


def regular_before(state: dict[str, Any], path: Path) -> int | None:
    """The step of the scheduled checkpoint before this one; None if there is none, or it is not recorded."""
    return fitted({"regular_before": None} | state, {"regular_before": int | None}, path)["regular_before"]


def _is_one(value: Any, kind: type) -> bool:
    if type(value) is int and kind in (int, float):
        return abs(value) < 2**63
    return type(value) is kind


def _named(form: Any) -> str:
    if isinstance(form, list):
        return f"a list of {len(form)}"
    return NAMES[dict if isinstance(form, dict) else form]


def _misfit(what: str, path: Path) -> InputError:
    return InputError(
        f"the saved state does not fit the run: {what}",
        where=str(path),
        fix="use a checkpoint of this run, or move this one away to resume from the one before",
    )
