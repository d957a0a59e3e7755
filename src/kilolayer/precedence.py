"""Values given on the command line or in Python take precedence over conflicting values in a file."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from functools import reduce
from typing import Any

from kilolayer.config import Config, DataclassInstance, Table, build, merge, section_of
from kilolayer.errors import IdleOptionError, OptionError


@dataclasses.dataclass(frozen=True)
class Given:
    """A configuration as given: tables, and those that override them. sources: what the two are called in errors."""

    tables: Table
    over: Table
    sources: tuple[str, ...]

    @property
    def merged(self) -> Table:
        """Both merged into one table."""
        return merge(self.tables, self.over)

    def build(self, cls: type[Config], below: Mapping[str, Any] | None = None) -> Config:
        """Build the configuration, with the values `below` as defaults; an error says where the wrong value came from."""
        try:
            return build(cls, override(cls, merge(dict(below or {}), self.tables), self.over))
        except OptionError as error:
            raise error.at(f"in {' and '.join(self.sources)}") from None


def override(cls: type[DataclassInstance], table: Table, typed: Mapping[str, Any]) -> Table:
    """The table of a file overridden by typed options, which also win over conflicting options of the file.

    An option of the file that has no effect in combination with a typed one is dropped; so is one that says the same thing as a
    typed one in another way, as the class declares in `replaces`. A table whose `name` is typed keeps no option that belongs to
    another name. Contradictions within the file are kept, to be refused later.
    """
    try:
        table = remaining = _replaced(cls, table, typed)
        while (fault := _idle_option(cls, merge(remaining, typed))) is not None:
            named = [name for name in (fault.idle, *fault.beside) if _value_at(typed, name) is not None]
            idle = [fault.idle] if fault.idle not in named else list(fault.beside) if fault.either else []
            gone = [name for name in idle if name not in named and _value_at(remaining, name) is not None]
            if not named or not gone:
                return merge(remaining, typed)
            remaining = reduce(_without, gone, remaining)
        return merge(remaining, typed)
    except OptionError:
        return merge(table, typed)  # the caller that builds the configuration reports what is wrong, and where


def _idle_option(cls: type[DataclassInstance], table: Table) -> IdleOptionError | None:
    try:
        build(cls, table)
    except IdleOptionError as fault:
        return fault
    return None


def _replaced(cls: type[DataclassInstance], table: Table, typed: Mapping[str, Any]) -> Table:
    """The table without the options that typed options of the same table replace."""
    if choose := getattr(cls, "choose", None):
        cls = choose({**table, **typed})
    kept, hints = dict(table), typing.get_type_hints(cls)
    for name, value in typed.items():
        for other in getattr(cls, "replaces", {}).get(name, ()):
            if other not in typed and value != "none":
                kept.pop(other, None)
        below, section = kept.get(name), section_of(hints.get(name))
        if not isinstance(value, Mapping) or not isinstance(below, dict):
            continue
        if "name" in value and value["name"] != below.get("name"):
            kept[name] = {}
        elif section is not None:
            kept[name] = _replaced(section, below, value)
    return kept


def _value_at(table: Mapping[str, Any], place: str) -> Any:
    name, _, rest = place.partition(".")
    value = table.get(name)
    return _value_at(value, rest) if rest and isinstance(value, Mapping) else None if rest else value


def _without(table: Table, place: str) -> Table:
    name, _, rest = place.partition(".")
    if rest:
        return {**table, name: _without(table[name], rest)}
    return {key: value for key, value in table.items() if key != name}
