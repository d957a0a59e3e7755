"""Configuration: dataclasses that check themselves, TOML files with `extends`, and overrides from the command line.

Every value takes the same path, whatever its source: a plain table of names and values, then `build`, then `check`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, time
from functools import cache, reduce, wraps
from pathlib import Path
from typing import Any, ClassVar, Literal, ParamSpec, Protocol, TypeVar, get_args, get_origin

import tomli_w

from kilolayer import hints
from kilolayer.errors import (
    LONGEST_SHOWN,
    InputError,
    OptionError,
    UnknownOptionError,
    UnusedOptionError,
    nearest,
    shown,
    unknown,
)
from kilolayer.files.paths import resolve
from kilolayer.files.reading import check_depth, read_text

Table = dict[str, Any]

# tomllib's time is quadratic in the number of parts of a dotted name.
MANY_DOTS = re.compile(r"(?<![^\s=.\[\]])(?:[^\s=.\[\]]++\s*+\.\s*+){50}")
LARGEST_FILE = 1 << 20
"""Maximum size of a configuration file, in bytes."""
DEEPEST = 20
"""Maximum nesting of tables and lists; the options need four levels."""
MOST_FILES = 100
"""Maximum number of files that `extends` may chain."""
BARE_POINT = re.compile(r"[+-]?(?:\.\d+|\d+\.)(?:[eE][+-]?\d+)?")  # .5 and 5., which TOML does not know
UNWRITABLE = re.compile("[\x00\ud800-\udfff]")  # not allowed in file names, or in UTF-8 text


class DataclassInstance(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


Config = TypeVar("Config", bound=DataclassInstance)
Class = TypeVar("Class")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Range:
    """The range of numbers that an option accepts; `above` and `below` are exclusive bounds."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Whether a number is in the range; integers of any size are compared exactly."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        ends = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{word} {_plain(end)}" for word, end in ends.items() if end is not None)

    @property
    def short(self) -> str:
        """The range in short form, for a list of options."""
        if self.least is not None and self.most is not None:
            return f"{_plain(self.least)} to {_plain(self.most)}"
        return str(self)


@cache  # every configuration is checked, and to evaluate annotations takes a millisecond
def _type_hints(cls: type[DataclassInstance]) -> Mapping[str, Any]:
    return typing.get_type_hints(cls)


ANY_NUMBER = Range(least=-(2**63), most=2**63 - 1)


def bounded(default: Any, **ends: float) -> Any:
    """The default of a numeric option, with the bounds of its `Range`, which `check` enforces."""
    return dataclasses.field(default=default, metadata={"range": Range(**ends)})


def check(config: DataclassInstance) -> None:
    """Raise unless every field holds a value of its annotated type within its range.

    `build` calls it; a class that is also made by its constructor calls it in `__post_init__`.
    """
    hints = _type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not _fits(value, hints[field.name]):
            raise _misfit(field.name, value, hints[field.name])
        allowed = field.metadata.get("range", ANY_NUMBER)
        if isinstance(value, int | float) and not isinstance(value, bool) and not allowed.holds(value):
            raise OptionError(f"{field.name} is {shown(value)}", fix=f"{field.name} must be {allowed}")
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and UNWRITABLE.search(text):
                raise OptionError(
                    f"{field.name} is {shown(text)}",
                    fix="a configuration must be UTF-8 text: rename the file or folder, or remove these characters",
                )


def build(cls: type[Config], table: Mapping[str, Any], where: str = "") -> Config:
    """An instance of the dataclass `cls` from a table; an unknown name raises with the nearest valid one.

    A field whose metadata has `parse` is read by that function; a field that is a dataclass is built from its own table. A
    class method `choose` of `cls` names the subclass that is built, and one called `complete` adds defaults that depend on
    other values, and refuses what may not be given together.
    """
    if choose := getattr(cls, "choose", None):
        cls = choose(table)
    if complete := getattr(cls, "complete", None):
        with _located(where):
            table = complete(table)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = _type_hints(cls)
    values: Table = {}
    for name, value in table.items():
        inside = f"{where}.{name}" if where else name
        if name not in fields:
            if below := _path_below(cls, name):
                meant = f"{where}.{below}" if where else below
                raise UnknownOptionError(f"unknown option {shown(inside)}; did you mean {meant!r}?", fix="put it there")
            raise unknown(name, fields, where=where, beside=[each for each in table if each not in fields])
        values[name] = _value_of(fields[name], hints[name], value, inside)
    with _located(where):
        built = cls(**values)
        check(built)
    return built


@contextmanager
def _located(where: str) -> Iterator[None]:
    """Errors inside name the table that is built."""
    try:
        yield
    except OptionError as error:
        if isinstance(error, UnusedOptionError) and where:
            error = error.below(where)
        raise (error if error.where else error.at(where)) from None


def convert_fields(config: DataclassInstance) -> None:
    """Convert constructor arguments in TOML form, a table or "none", to the types of their fields; call it before `check`."""
    hints = _type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, str | Mapping) or "parse" in field.metadata:
            object.__setattr__(config, field.name, _value_of(field, hints[field.name], value, field.name))


def _value_of(field: dataclasses.Field[Any], hint: Any, value: Any, path: str) -> Any:
    """The value of a field, converted from the value in a table."""
    if parse := field.metadata.get("parse"):
        return parse(value)
    if value == "none" and type(None) in _alternatives(hint):
        return None
    if section := section_of(hint):
        if not isinstance(value, Mapping):
            raise OptionError(f"{path} is {shown(value)}", fix=f"write it as a table, [{path}]")
        return build(section, value, path)
    return value


def option_paths(cls: type[DataclassInstance], section: str = "") -> Iterator[str]:
    """The dotted names of all options of a configuration: `task`, `model.dim`, `model.moe.experts`."""
    hints = _type_hints(cls)
    for field in dataclasses.fields(cls):
        path = f"{section}.{field.name}".lstrip(".")
        inner = None if field.metadata.get("parse") else section_of(hints[field.name])
        yield from [path] if inner is None else option_paths(inner, path)


def _path_below(cls: type[DataclassInstance], name: str) -> str | None:
    """The dotted name in the tables of `cls` that ends in this name of an option or a table; None if there is none."""
    paths = (option.split(".") for option in option_paths(cls))
    return next((".".join(path[: path.index(name) + 1]) for path in paths if name in path), None)


def strict(init: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Make a constructor name the nearest valid keyword when it is given an unknown one."""
    valid = [name for name in inspect.signature(init).parameters if name != "self"]

    @wraps(init)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if others := [name for name in kwargs if name not in valid]:
            owner = init.__qualname__.removesuffix(".__init__")
            raise unknown(others[0], valid, where=f"in {owner}(...)", beside=others, keywords=True)
        return init(*args, **kwargs)

    return checked


def strict_class(cls: type[Class]) -> type[Class]:
    """`strict` for a dataclass, whose constructor is generated."""
    cls.__init__ = strict(cls.__init__)
    return cls


def load(path: Path) -> Table:
    """The table of a TOML file, merged over the file that its `extends` names, relative to it."""
    seen: list[Path] = []
    tables: list[Table] = []
    while True:
        path = resolve(path)
        if path in seen:
            raise OptionError(f"{path.name} extends itself", where=str(path), fix="remove the circular `extends`")
        if len(seen) == MOST_FILES:
            raise OptionError(f"more than {MOST_FILES} files extend one another", where=str(path), fix="merge some of them")
        seen.append(path)
        tables.append(_load(path))
        parent = tables[-1].pop("extends", None)
        if parent is None:
            return reduce(merge, reversed(tables))
        if not isinstance(parent, str):
            raise OptionError(f"extends is {shown(parent)}", where=str(path), fix='write one file name: extends = "base.toml"')
        path = path.parent / parent


def _load(path: Path) -> Table:
    try:
        return parse_toml(read_text(path, LARGEST_FILE).removeprefix("\ufeff"))
    except InputError as error:
        raise OptionError(error.what, where=error.where, fix=error.fix) from None
    except ValueError as error:
        raise OptionError(f"not valid TOML: {error}", where=str(path), fix="see https://toml.io for the syntax") from None


def parse_toml(text: str) -> Table:
    """The table of a TOML text; anything wrong with it, including excessive nesting, is a ValueError."""
    if MANY_DOTS.search(text):
        raise ValueError("a name has more than 50 parts")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_depth(table, DEEPEST)
    return table


def merge(base: Table, over: Mapping[str, Any]) -> Table:
    """`base` overridden by `over`; tables are merged name by name, other values are replaced.

    A text in `base` that a table overrides is the table's `name`: `recipe = "admin"` stands for `recipe = { name = "admin" }`.
    """
    merged = dict(base)
    for name, value in over.items():
        below = merged.get(name)
        if isinstance(below, str) and isinstance(value, Mapping):
            below = {"name": below}
        merged[name] = merge(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return merged


def overrides(arguments: Sequence[str]) -> Table:
    """The table for arguments such as `--model.dim 512 --model.recipe.name=admin`; values are read as TOML, else as text."""
    typed: list[tuple[str, str]] = []
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        name, equals, text = flag.removeprefix("--").partition("=")
        if not flag.startswith("--") or not name:
            raise OptionError(f"unexpected argument {shown(flag)}", fix="options are written --section.name VALUE")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise OptionError(f"{flag} has no value", fix=f"write {flag} VALUE")
            text = rest.pop(0)
        typed.append((name, text))
    table: Table = {}
    # A name is set before the options below it, whatever the order on the command line: --recipe.weight fixed --recipe admin.
    for name, text in sorted(typed, key=lambda pair: pair[0].count(".")):
        entry: Any = toml_value(text)
        keys = name.split(".")
        if len(keys) > DEEPEST:
            raise OptionError(f"unknown option {shown(name)}", fix=f"options are nested in at most {DEEPEST} tables")
        for key in reversed(keys):
            entry = {key: entry}
        table = merge(table, entry)
    return table


def table_of(config: DataclassInstance) -> Table:
    """The configuration as plain TOML values, from which `build` makes the same configuration.

    A field whose metadata has `table` is converted by that function. A property `without_effect` of the configuration names the
    fields that are left out.
    """
    table: Table = {}
    without_effect: Collection[str] = getattr(config, "without_effect", ())
    for each in dataclasses.fields(config):
        if each.name in without_effect:
            continue
        value = getattr(config, each.name)
        if write := each.metadata.get("table"):
            table[each.name] = write(value)
        elif dataclasses.is_dataclass(value):
            table[each.name] = table_of(typing.cast("DataclassInstance", value))
        elif value is not None or each.default is not None:
            table[each.name] = "none" if value is None else value
    return table


def dump(table: Mapping[str, Any]) -> str:
    """A table as TOML text."""
    return tomli_w.dumps(table)


def help_texts(cls: type[DataclassInstance]) -> dict[str, str]:
    """The docstring under each field of `cls` and of its base classes."""
    texts: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if dataclasses.is_dataclass(owner):
            texts |= _own_help_texts(owner)
    return texts


@cache  # Python parses the whole module to find the source of a class
def _own_help_texts(cls: type[DataclassInstance]) -> dict[str, str]:
    definition = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(definition, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match text:
                case ast.Expr(value=ast.Constant(value=str(words))):
                    texts[field.target.id] = " ".join(words.split())
                case _:
                    pass
    return texts


def toml_value(text: str) -> Any:
    """The value of a text from the command line: as TOML reads it, else the text itself; `.5` and `5.` are numbers too.

    No option is a date: a folder may be named after one.
    """
    if BARE_POINT.fullmatch(text):
        return float(text)
    try:
        value = parse_toml(f"value = {text}")["value"]
        return text if isinstance(value, date | time) else value
    except tomllib.TOMLDecodeError:
        return text
    except ValueError as error:
        raise OptionError(f"the value {shown(text)} cannot be read: {error}", where="on the command line") from None


def section_of(hint: Any) -> type[DataclassInstance] | None:
    """The dataclass that a field of this type is built from, even if the field is optional; None for plain values."""
    kinds = [kind for kind in _alternatives(hint) if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
    return kinds[0] if kinds else None


def choices_of(hint: Any) -> tuple[Any, ...]:
    """The values that a field of this type is limited to; empty if it is not an enumeration."""
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
            if isinstance(value, int) and not isinstance(value, bool):
                return True
            if isinstance(value, float) and math.isfinite(value):
                return True
        elif kind is int:
            if isinstance(value, int) and not isinstance(value, bool):
                return True
        elif get_origin(kind) is list:
            if isinstance(value, list) and all(_fits(each, get_args(kind)[0]) for each in value):
                return True
        elif isinstance(value, get_origin(kind) or kind):
            return True
    return False


KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[str]: "a list of texts",
    type(None): '"none"',
}


def _plain(end: float) -> str:
    """A bound in readable form."""
    return f"{end:,}" if isinstance(end, int) else f"{end:g}"


def _misfit(name: str, value: Any, hint: Any) -> OptionError:
    kinds = _alternatives(hint)
    choices = choices_of(hint)
    others = [KINDS.get(kind, getattr(kind, "__name__", str(kind))) for kind in kinds if get_origin(kind) is not Literal]
    guess = ""
    words = [choice for choice in choices if isinstance(choice, str)]
    if words and isinstance(value, str) and (near := nearest(value, words)):
        guess = f"; did you mean {near!r}?"
    allowed = ", ".join([*(repr(choice) for choice in choices), *others])
    example = ""
    if list[str] in kinds:
        items = value.split(",") if isinstance(value, str) and len(value) < LONGEST_SHOWN else ["one", "two"]
        example = "[" + ", ".join(f'"{item.strip()}"' for item in items) + "]"
    elif str in kinds and isinstance(value, int) and not isinstance(value, bool):
        example = f'"{value}"'
    if example:
        allowed += f": {name} = {example}"
        if hints.in_shell():
            allowed += f"; typed in a shell with quotes around: '{example}'"
    return OptionError(f"{name} is {shown(value)}{guess}", fix=f"allowed: {allowed}")


@dataclasses.dataclass(frozen=True)
class RawConfig:
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
            return build(cls, override(cls, override(cls, dict(below or {}), self.tables), self.over))
        except OptionError as error:
            raise (error.at(f"in {' and '.join(self.sources)}") if self.sources else error) from None


def override(cls: type[DataclassInstance], table: Table, typed: Mapping[str, Any]) -> Table:
    """The table of a file overridden by typed options, which also win over conflicting options of the file.

    An option of the file that has no effect in combination with a typed one is dropped; so is one that says the same thing as a
    typed one in another way, as the class declares in `replaces`. A table whose `name` is typed keeps no option that belongs to
    another name. Contradictions within the file are kept, to be refused later.
    """
    try:
        table = remaining = _replaced(cls, table, typed)
        while (fault := _unused_option(cls, merge(remaining, typed))) is not None:
            named = [name for name in (fault.unused, *fault.beside) if _value_at(typed, name) is not None]
            unused = [fault.unused] if fault.unused not in named else list(fault.beside) if fault.either else []
            gone = [name for name in unused if name not in named and _value_at(remaining, name) is not None]
            if not named or not gone:
                return merge(remaining, typed)
            remaining = reduce(_without, gone, remaining)
        return merge(remaining, typed)
    except OptionError:
        return merge(table, typed)  # the caller that builds the configuration reports what is wrong, and where


def _unused_option(cls: type[DataclassInstance], table: Table) -> UnusedOptionError | None:
    try:
        build(cls, table)
    except UnusedOptionError as fault:
        return fault
    return None


def _replaced(cls: type[DataclassInstance], table: Table, typed: Mapping[str, Any]) -> Table:
    """The table without the options that typed options of the same table replace."""
    if choose := getattr(cls, "choose", None):
        cls = choose({**table, **typed})
    kept, hints = dict(table), _type_hints(cls)
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


def _value_at(table: Mapping[str, Any], path: str) -> Any:
    name, _, rest = path.partition(".")
    value = table.get(name)
    return _value_at(value, rest) if rest and isinstance(value, Mapping) else None if rest else value


def _without(table: Table, path: str) -> Table:
    name, _, rest = path.partition(".")
    if rest:
        return {**table, name: _without(table[name], rest)}
    return {key: value for key, value in table.items() if key != name}
