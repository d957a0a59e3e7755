"""Reads the configuration that Python code gives a run, in any of its forms, and the tables that override it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import is_dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kilolayer.config import RawConfig, Table, load, table_of
from kilolayer.errors import OptionError, shown
from kilolayer.files.paths import as_path
from kilolayer.recipes.base import Recipe
from kilolayer.tasks import registry

if TYPE_CHECKING:
    from kilolayer.tasks.config import RunConfig

Source: TypeAlias = "str | PathLike[str] | Mapping[str, Any] | RunConfig | None"
"""A TOML file, a dict of tables, or a configuration; None: the embedded default."""


def new_folder(config: Source, run: str | PathLike[str] | None) -> Path:
    """The folder of a new run: the one that is given, or runs/NAME after the configuration file."""
    if run is not None:
        return as_path(run, "run")
    if config is None:
        return Path("runs") / registry.EMBEDDED.stem
    if isinstance(config, str | PathLike):
        return Path("runs") / Path(config).stem
    raise OptionError("no run folder is given", fix='name one: run="runs/mine"')


def read_source(config: Source, over: Table) -> RawConfig:
    """The tables of a configuration, with those that override it."""
    above = ("the keywords",) if over else ()
    if config is None or isinstance(config, str | PathLike):
        path = registry.EMBEDDED if config is None else Path(config)
        return RawConfig(load(path), over, (str(path), *above))
    tables = plain_tables(config)
    if not isinstance(tables, dict):
        raise OptionError(
            f"the configuration is {shown(config)}", where="kl.train", fix="give a TOML file, or a dict of tables"
        )
    return RawConfig(tables, over, ("the configuration", *above))


def plain_tables(value: Any) -> Any:
    """A Python value in the form of TOML: dataclasses and recipes become tables, paths become text, None becomes "none"."""
    match value:
        case Recipe():
            return value.table()
        case Mapping():
            for name in value:
                if not isinstance(name, str):
                    raise OptionError(f"{shown(name)} is not the name of an option", fix='give names as text: {"steps": 500}')
            return {name: plain_tables(each) for name, each in value.items()}
        case list() | tuple():
            return [plain_tables(each) for each in value]
        case PathLike():
            return os.fspath(value)
        case None:
            return "none"
        case _ if is_dataclass(value) and not isinstance(value, type):
            return table_of(value)
        case _:
            return value
