"""Scripts under benchmarks and examples, most of which no test runs: each compiles, and finds what it takes of the package."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))
DOTTED = re.compile(r"kilolayer(\.\w+)+")


@cache
def names_in(module: str) -> frozenset[str] | None:
    """What a module of the package binds at its top level, and the modules below it; None where there is no such module."""
    place = (ROOT / "src").joinpath(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not file.exists():
        return None
    below = {each.stem for each in place.iterdir()} if place.is_dir() else set()
    return frozenset({*bound_names(ast.parse(file.read_text())), *below})


def bound_names(node: ast.AST) -> Iterator[str]:
    """The names that a module binds itself, not those inside its functions, classes and comprehensions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name
        elif isinstance(child, ast.alias):
            yield child.asname or child.name.partition(".")[0]
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        elif not isinstance(child, ast.comprehension | ast.Lambda):
            yield from bound_names(child)


def taken_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Module and name of what a script takes of the package: by import, as `kl.name`, and by the text that a patch names."""
    aliases = {"kilolayer"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {each.asname for each in node.names if each.name == "kilolayer" and each.asname}
            yield from (split(each.name) for each in node.names if each.name.startswith("kilolayer."))
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "kilolayer":
            yield from ((node.module, each.name) for each in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and DOTTED.fullmatch(node.value):
            yield split(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield "kilolayer", node.attr


def split(dotted: str) -> tuple[str, str]:
    module, _, name = dotted.rpartition(".")
    return module, name


def missing(tree: ast.Module) -> list[str]:
    """What a script takes of the package that is not there."""
    return sorted({f"{module}.{name}" for module, name in taken_names(tree) if not is_there(module, name)})


def is_there(module: str, name: str) -> bool:
    """Every module that exists has names such as __file__."""
    names = names_in(module)
    return names is not None and (name in names or name.startswith("__"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_compiles_and_finds_what_it_takes_of_the_package(path: Path) -> None:
    text = path.read_text()
    compile(text, str(path), "exec")
    assert missing(ast.parse(text)) == []


def test_what_is_gone_is_named() -> None:
    script = """
import kilolayer as kl
import kilolayer.layers.normed
from kilolayer.layers import norms
from kilolayer.layers.norms.layer import LayerNorm, BatchNorm
from kilolayer.train.step import Stepper
def later() -> None:
    from kilolayer import Decoder, Recoder
    patch("kilolayer.speed.written.LEAST_INT8", 0), patch("kilolayer.speed.written.LEAST_INT4", 0)
    kl.fast(kl.Decoder), kl.slow, kl.__version__
"""
    gone = [
        "Recoder",
        "layers.normed",
        "layers.norms.layer.BatchNorm",
        "slow",
        "speed.written.LEAST_INT4",
        "train.step.Stepper",
    ]
    assert missing(ast.parse(script)) == [f"kilolayer.{name}" for name in gone]


@pytest.mark.parametrize("module", ["kilolayer.config", "kilolayer.recipes.base", "kilolayer.speed.written"])
def test_the_names_of_a_source_are_those_that_its_import_gives(module: str) -> None:
    given = {name for name in vars(importlib.import_module(module)) if not name.startswith("__")}
    assert {name for name in names_in(module) or () if not name.startswith("__")} == given
