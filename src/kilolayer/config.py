"""Configuration: dataclasses that check themselves, TOML files with `extends`, overrides from the command line.

A value takes one way in, whatever its source: a plain table of names and values, then `build`, then `check`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import math
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, Literal, ParamSpec, Protocol, TypeVar, get_args, get_origin

from kilolayer.errors import OptionError, UnknownOptionError, nearest, unknown

Table = dict[str, Any]


class DataclassInstance(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


Config = TypeVar("Config", bound=DataclassInstance)
Kind = TypeVar("Kind")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def check(config: DataclassInstance) -> None:
    """Raise unless every field holds a value of its annotated type; call it in `__post_init__`."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not _fits(value, hints[field.name]):
            raise _misfit(field.name, value, hints[field.name])


def build(cls: type[Config], table: Mapping[str, Any], where: str = "") -> Config:
    """An instance of the dataclass `cls` from a table; an unknown name raises with the nearest valid one.

    A field whose metadata has `parse` is read by that function; a field that is a dataclass is built from its own table. A
    class method `complete` of `cls` adds defaults that depend on other values.
    """
    if complete := getattr(cls, "complete", None):
        table = complete(table)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    values: Table = {}
    for name, value in table.items():
        inside = f"{where}.{name}" if where else name
        if name not in fields:
            if below := _place_below(cls, name):
                meant = f"{where}.{below}" if where else below
                raise UnknownOptionError(f"unknown option {inside!r}; did you mean {meant!r}?", fix="write it there")
            raise unknown(name, fields, where=where)
        if parse := fields[name].metadata.get("parse"):
            value = parse(value)
        elif value == "none" and type(None) in _alternatives(hints[name]):
            value = None
        elif section := section_of(hints[name]):
            if not isinstance(value, Mapping):
                raise OptionError(f"{inside} is {value!r}", fix=f"write it as a table, [{inside}]")
            value = build(section, value, inside)
        values[name] = value
    try:
        return cls(**values)
    except OptionError as error:
        raise (error if error.where else error.at(where)) from None


def option_places(cls: type[DataclassInstance], section: str = "") -> Iterator[str]:
    """Where each option of a configuration stands: `task`, `model.dim`, `model.moe.experts`."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        place = f"{section}.{field.name}".lstrip(".")
        inner = None if field.metadata.get("parse") else section_of(hints[field.name])
        yield from [place] if inner is None else option_places(inner, place)


def _place_below(cls: type[DataclassInstance], name: str) -> str | None:
    """Where in the tables of `cls` there is an option or a table of this name."""
    paths = (place.split(".") for place in option_places(cls))
    return next((".".join(path[: path.index(name) + 1]) for path in paths if name in path), None)


def strict(init: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Make a constructor name the nearest valid keyword when it is given an unknown one."""
    valid = [name for name in inspect.signature(init).parameters if name != "self"]

    @wraps(init)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        for name in kwargs:
            if name not in valid:
                owner = init.__qualname__.removesuffix(".__init__")
                raise unknown(name, valid, where=f"in {owner}(...)")
        return init(*args, **kwargs)

    return checked


def strict_class(cls: type[Kind]) -> type[Kind]:
    """The same for a dataclass, whose constructor is made for it."""
    cls.__init__ = strict(cls.__init__)
    return cls


def load(path: Path) -> Table:
    """The table of a TOML file, laid over the file that its `extends` names (relative to it)."""
    return _load(path, seen=())


def _load(path: Path, seen: tuple[Path, ...]) -> Table:
    path = path.resolve()
    if path in seen:
        raise OptionError(f"{path.name} extends itself", where=str(path), fix="break the circle of `extends`")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OptionError("the configuration file does not exist", where=str(path), fix="check the path") from None
    except (IsADirectoryError, PermissionError) as error:
        raise OptionError("the configuration file cannot be read", where=str(path), fix=str(error.strerror).lower()) from None
    except UnicodeDecodeError as error:
        raise OptionError("the file is not UTF-8 text", where=f"{path}, byte {error.start}", fix="save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise OptionError(f"not valid TOML: {error}", where=str(path), fix="see https://toml.io for the syntax") from None
    parent = table.pop("extends", None)
    if parent is None:
        return table
    if not isinstance(parent, str):
        raise OptionError(f"extends is {parent!r}", where=str(path), fix='write one file name: extends = "base.toml"')
    return merge(_load(path.parent / parent, (*seen, path)), table)


def merge(base: Table, over: Mapping[str, Any]) -> Table:
    """`base` with the values of `over`; tables are merged name by name, other values are replaced.

    A text under a table is that table's `name`: `recipe = "admin"` stands for `recipe = { name = "admin" }`.
    """
    merged = dict(base)
    for name, value in over.items():
        below = merged.get(name)
        if isinstance(below, str) and isinstance(value, Mapping):
            below = {"name": below}
        merged[name] = merge(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return merged


def overrides(arguments: Sequence[str]) -> Table:
    """The table that `--model.dim 512 --model.recipe.name=admin` stands for; values are read as TOML, else as text."""
    typed: list[tuple[str, str]] = []
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        name, equals, text = flag.removeprefix("--").partition("=")
        if not flag.startswith("--") or not name:
            raise OptionError(f"unexpected argument {flag!r}", fix="options are written --section.name VALUE")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise OptionError(f"{flag} has no value", fix=f"write {flag} VALUE")
            text = rest.pop(0)
        typed.append((name, text))
    table: Table = {}
    # A name goes before the options below it, in whatever order they were typed: --recipe.weight fixed --recipe admin.
    for name, text in sorted(typed, key=lambda pair: pair[0].count(".")):
        entry: Any = _toml_value(text)
        for key in reversed(name.split(".")):
            entry = {key: entry}
        table = merge(table, entry)
    return table


def table_of(config: DataclassInstance) -> Table:
    """The configuration as plain values, as TOML holds them; `build` makes the same configuration of it.

    A field whose metadata has `table` is written by that function.
    """
    table: Table = {}
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if write := each.metadata.get("table"):
            table[each.name] = write(value)
        elif dataclasses.is_dataclass(value):
            table[each.name] = table_of(typing.cast("DataclassInstance", value))
        elif value is not None or each.default is not None:
            table[each.name] = "none" if value is None else value
    return table


def dump(table: Mapping[str, Any], section: str = "") -> str:
    """A table as TOML text: plain values first, then the tables below it."""
    lines = [f"{name} = {_toml_text(value)}" for name, value in table.items() if not isinstance(value, Mapping)]
    text = "\n".join([*([f"[{section}]"] if section and lines else []), *lines])
    below = [dump(value, f"{section}.{name}".lstrip(".")) for name, value in table.items() if isinstance(value, Mapping)]
    return "\n\n".join(part for part in (text, *below) if part) + ("" if section else "\n")


def _toml_text(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value)
        case list() | tuple():
            return f"[{', '.join(map(_toml_text, value))}]"
        case _:
            raise TypeError(f"{value!r} cannot be written as TOML")


def help_texts(cls: type[DataclassInstance]) -> dict[str, str]:
    """The text written under each field of `cls` and of the dataclasses that it extends."""
    texts: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        definition = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(definition, ast.ClassDef)
        for field, text in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                match text:
                    case ast.Expr(value=ast.Constant(value=str(words))):
                        texts[field.target.id] = " ".join(words.split())
                    case _:
                        pass
    return texts


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def section_of(hint: Any) -> type[DataclassInstance] | None:
    """The dataclass that a field of this type is built from, also where the field may be absent; None for plain values."""
    kinds = [kind for kind in _alternatives(hint) if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
    return kinds[0] if kinds else None


def choices_of(hint: Any) -> tuple[Any, ...]:
    """The values that a field of this type may be one of; empty where any value of a kind is taken."""
    return tuple(choice for kind in _alternatives(hint) if get_origin(kind) is Literal for choice in get_args(kind))


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    for kind in _alternatives(hint):
        if get_origin(kind) is Literal:
            if any(value == choice and type(value) is type(choice) for choice in get_args(kind)):
                return True
        elif kind is Any:
            return True
        elif kind is float:
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                return True
        elif kind is int:
            if isinstance(value, int) and not isinstance(value, bool):
                return True
        elif isinstance(value, get_origin(kind) or kind):
            return True
    return False


KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): '"none"'}


def _misfit(name: str, value: Any, hint: Any) -> OptionError:
    kinds = _alternatives(hint)
    choices = choices_of(hint)
    others = [KINDS.get(kind, getattr(kind, "__name__", str(kind))) for kind in kinds if get_origin(kind) is not Literal]
    guess = ""
    words = [choice for choice in choices if isinstance(choice, str)]
    if words and isinstance(value, str):
        guess = f"; did you mean {nearest(value, words)!r}?"
    allowed = ", ".join([*(repr(choice) for choice in choices), *others])
    return OptionError(f"{name} is {value!r}{guess}", fix=f"allowed: {allowed}")
