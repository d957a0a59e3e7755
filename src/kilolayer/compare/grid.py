"""The runs of a comparison: the options that vary, their values, and every combination of these.

An option is named as on the command line, `train.lr`. `layers` stands for the depth of a model of any shape: 6 is the depth of
each stack, "60-12" that of encoder and decoder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from kilolayer import hints
from kilolayer.config import Table, merge, override, toml_value
from kilolayer.errors import OptionError, shown
from kilolayer.tasks.config import RunConfig

RECIPE, LAYERS, SEED, RUN, TASK = "model.recipe", "layers", "train.seed", "run", "task"
MOE, EXPERTS = "model.moe.", "model.moe.experts"
DEPTHS = ("model.layers", "model.encoder_layers", "model.decoder_layers")
Setting = dict[str, Any]
"""The value of each option that varies."""
NO_DEPTH = "none"
"""The depth of an existing run whose task brings a model without layers; no run can be given it."""
TWO_DEPTHS = re.compile(r"(\d+)-(\d+)")
OPTION = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)+")
UNNAMED = re.compile(r"[^\w.+=-]+", re.ASCII)
LONGEST_NAME = 150
"""Maximum number of characters in a run's name; file systems allow 255."""


@dataclass(frozen=True)
class Axis:
    """An option and the values that are compared, without duplicates."""

    name: str
    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if self.name not in (LAYERS, RUN, TASK) and not (isinstance(self.name, str) and OPTION.fullmatch(self.name)):
            raise OptionError(f"{shown(self.name)} is not an option", fix="name it with its table, as in train.lr")
        if not self.values:
            listed = f'give a list: {{"{self.name}": [1, 2]}}'
            fix = f"separate them with commas: {self.name}=1,2" if hints.in_shell() else listed
            raise OptionError(f"{self.name} has no values", fix=fix)
        kept = {_key(value): value for value in self.values}
        object.__setattr__(self, "values", tuple(kept.values()))
        if self.name == LAYERS:
            for value in self.values:
                if value != NO_DEPTH:
                    _depths(value)


def parse_axis(name: str, text: str) -> Axis:
    """Parse an axis such as `4e-4,8e-4`; values are read as TOML, else as text. Commas inside brackets do not separate."""
    words = _split(text)
    if not all(words):
        raise OptionError(f"a value of {name} is empty: {shown(text)}", fix="separate the values with single commas")
    return Axis(name, tuple(map(toml_value, words)))


def join_axes(axes: Iterable[Axis]) -> list[Axis]:
    """Merge axes of the same name by joining their values."""
    joined: dict[str, Axis] = {}
    for axis in axes:
        before = joined[axis.name].values if axis.name in joined else ()
        joined[axis.name] = Axis(axis.name, (*before, *axis.values))
    return list(joined.values())


def settings_of(axes: Sequence[Axis]) -> list[Setting]:
    """Every combination of values; the last axis varies fastest."""
    names = [axis.name for axis in axes]
    return [dict(zip(names, values, strict=True)) for values in product(*(axis.values for axis in axes))]


def axes_of(settings: Iterable[Mapping[str, Any]]) -> list[Axis]:
    """The options that occur in the settings, with their values, in order of first occurrence."""
    values: dict[str, list[Any]] = {}
    for setting in settings:
        for name, value in setting.items():
            values.setdefault(name, []).append(value)
    return [Axis(name, tuple(found)) for name, found in values.items()]


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two settings are equal; 1 and 1.0 are the same value, 1 and true are not."""
    return {name: _key(value) for name, value in a.items()} == {name: _key(value) for name, value in b.items()}


def effective(setting: Mapping[str, Any]) -> Setting:
    """The setting without what has no effect: a dense model has no options of experts."""
    is_dense = setting.get(EXPERTS) == "none"
    return {name: value for name, value in setting.items() if not is_dense or name == EXPERTS or not name.startswith(MOE)}


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The options that do not have the same value in all settings, or are missing from some."""
    return [axis.name for axis in axes_of(settings) if len(axis.values) > 1 or any(axis.name not in each for each in settings)]


def name_of(setting: Mapping[str, Any], named: Collection[str] | None = None) -> str:
    """A folder name that shows the values, `deepnorm-18L-lr0.0004-seed1`; different values have different names.

    named: the options whose values it shows; if None, or if the setting has none of them, all.
    """
    if not setting:
        return "run"
    visible = {name: value for name, value in setting.items() if named is None or name in named} or setting
    last = [name.rpartition(".")[2] for name in visible]
    parts = [_part(name, value, last.count(name.rpartition(".")[2]) > 1) for name, value in visible.items()]
    plain = "-".join(part for part, _ in parts)
    if all(whole for _, whole in parts) and len(plain) <= LONGEST_NAME:
        return plain
    digest = hashlib.sha256(json.dumps([[name, _key(value)] for name, value in setting.items()]).encode()).hexdigest()[:8]
    return f"{plain[:LONGEST_NAME]}-{digest}"


def shown_value(name: str, value: Any) -> str:
    """A value as shown in a table."""
    if name == LAYERS and value != NO_DEPTH:
        return "L-".join(f"{value}".split("-")) + "L"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        options = (f"{key}={shown_value(key, each)}" for key, each in value.items() if key != "name")
        return " ".join([*filter(None, [value.get("name")]), *options])
    return f"{value:g}" if isinstance(value, float) else str(value)


def apply_setting(base: Mapping[str, Any], setting: Mapping[str, Any]) -> Table:
    """The tables of a run: those of the base, overridden by a setting. A recipe replaces the base's whole recipe.

    A model with "none" experts is dense.
    """
    table = dict(base)
    options = {name: value for name, value in effective(setting).items() if name != LAYERS}
    if LAYERS in setting:
        depths = _depths(setting[LAYERS])
        names = DEPTHS[:1] if len(depths) == 1 else DEPTHS[1:]
        options |= dict(zip(names, depths, strict=True))
    replaced = ["recipe"] if RECIPE in setting else []
    if setting.get(EXPERTS) == "none":
        replaced.append("moe")
        del options[EXPERTS]
    if replaced and isinstance(model := table.get("model"), Mapping):
        table["model"] = {name: value for name, value in model.items() if name not in replaced}
    return override(RunConfig, table, nested(options))


def nested(options: Mapping[str, Any]) -> Table:
    """Nested tables from options with dotted names; values may already be tables."""
    table: Table = {}
    # A name comes before the options below it.
    for name, value in sorted(options.items(), key=lambda pair: pair[0].count(".")):
        entry: Any = value
        for key in reversed(name.split(".")):
            entry = {key: entry}
        table = merge(table, entry)
    return table


def _depths(value: Any) -> tuple[int, ...]:
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if isinstance(value, str) and (found := TWO_DEPTHS.fullmatch(value)):
        return tuple(map(int, found.groups()))
    both = "60-12" if hints.in_shell() else '"60-12"'
    raise OptionError(
        f"layers is {shown(value)}",
        where=hints.argument("layers"),
        fix=f"write 6 for each stack, or {both} for encoder and decoder",
    )


def _part(name: str, value: Any, ambiguous: bool) -> tuple[str, bool]:
    """The part of a name for one value, and whether it identifies the value exactly."""
    text = shown_value(name, value)
    whole = not isinstance(value, float) or float(text) == value
    if name not in (RECIPE, LAYERS):
        text = f"{name if ambiguous else name.rpartition('.')[2]}{'' if text[:1].isdigit() else '='}{text}"
    kept = UNNAMED.sub("_", text).strip(".")
    return kept, whole and kept == text and isinstance(value, int | float | str)


def _key(value: Any) -> str:
    """A key that is the same only for equal values."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return repr(float(value)) if number and abs(value) < 2**53 else f"{type(value).__name__} {value!r}"


def _split(text: str) -> list[str]:
    """Split at the commas that are not inside brackets or quotes."""
    words, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            words.append("")
        else:
            words[-1] += letter
    return [word.strip() for word in words]
