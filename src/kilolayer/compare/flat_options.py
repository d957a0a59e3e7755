"""The options of a configuration by their dotted names (`train.lr`), and those in which configurations differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kilolayer import recipes
from kilolayer.compare.grid import LAYERS, RECIPE, SEED, Setting
from kilolayer.errors import KilolayerError
from kilolayer.models.config import DEFAULT_LAYERS
from kilolayer.tasks.config import RunConfig

ALWAYS_NAMED = (RECIPE, LAYERS, SEED)
"""Options that always describe a run, even if all runs have the same value."""
NEVER_NAMED = ("train.layers_every", "train.threads", "train.timeout", "train.log_every", "train.device")
NEVER_NAMED += ("train.tensorboard", "train.trackers")
"""Options that may differ between runs without affecting what they learn."""


def flat_options(table: Mapping[str, Any], above: str = "") -> Setting:
    """Values by their dotted names; recipe and depth are one option each."""
    values: Setting = {}
    for name, value in table.items():
        path = f"{above}{name}"
        if path == RECIPE:
            values[path] = plain_recipe(value)
        elif isinstance(value, Mapping):
            values |= flat_options(value, f"{path}.")
        else:
            values[path] = value
    if not above and _has_layers(table):
        depths = [values.pop(f"model.{name}", None) for name in ("encoder_layers", "decoder_layers", "layers")]
        stacks = [depth if depth not in (None, "none") else depths[2] for depth in depths[:2]]
        shape = values.get("model.shape", "encoder_decoder")
        used = stacks if shape == "encoder_decoder" else stacks[:1] if shape == "encoder" else stacks[1:]
        used = [DEFAULT_LAYERS if depth in (None, "none") else depth for depth in used]
        values[LAYERS] = used[0] if len(set(used)) == 1 else "-".join(map(str, used))
    return values


def _has_layers(table: Mapping[str, Any]) -> bool:
    """Whether the tables of a run describe a Transformer, rather than a model that the task brings."""
    try:
        return not RunConfig.choose(table).brings_model()
    except KilolayerError:  # a task that is not known here
        return True


def differing_options(tables: Sequence[Mapping[str, Any]]) -> list[Setting]:
    """For each configuration, the options in which it differs from the others; recipe, depth and seed are always included."""
    flat = [flat_options(table) for table in tables]
    names = list(dict.fromkeys(name for values in flat for name in values))
    named = [
        name
        for name in names
        if name in ALWAYS_NAMED or (name not in NEVER_NAMED and len({repr(values.get(name)) for values in flat}) > 1)
    ]
    return [{name: values.get(name, "none") for name in named} for values in flat]


def common_options(tables: Sequence[Mapping[str, Any]]) -> Setting:
    """The options that have the same value in all configurations."""
    first, *others = [flat_options(table) for table in tables] or [{}]
    return {name: value for name, value in first.items() if all(repr(each.get(name)) == repr(value) for each in others)}


def plain_recipe(value: Any) -> Any:
    """Only the recipe's name if all its options have their defaults."""
    try:
        recipe = recipes.parse(value)
        usual = recipes.get(recipe.table_name()).options()
    except KilolayerError:
        return value
    changed = {name: each for name, each in recipe.options().items() if each != usual.get(name)}
    return {"name": recipe.table_name(), **changed} if changed else recipe.table_name()
