"""The order of the house: which room may import which, and what no room may do."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kilolayer as kl

SOURCE = Path(kl.__file__).parent
# Each room may import the rooms before it.
ORDER = [
    "errors",
    "config",
    "parallel",
    "recipes",
    "layers",
    "moe",
    "models",
    "convert",
    "operators",
    "speed",
    "data",
    "generate",
]
ORDER += ["evaluate", "tasks", "training", "probe", "report", "cli"]
FILES = sorted(SOURCE.rglob("*.py"))


def room(module: str) -> str:
    """The first part below the package: kilolayer.layers.norm is in layers."""
    return module.split(".")[1] if "." in module else ""


def imports(path: Path) -> set[str]:
    """The modules of this package that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "kilolayer" else {node.module}
    return {name for name in found if name.startswith("kilolayer.")}


@pytest.mark.parametrize("path", [path for path in FILES if path.parent != SOURCE or path.stem in ORDER], ids=lambda p: p.stem)
def test_imports_run_one_way(path: Path) -> None:
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    for module in imports(path):
        if room(module) in ORDER:
            assert ORDER.index(room(module)) <= ORDER.index(own), f"{path.name} imports {module}"


def test_every_room_has_its_place() -> None:
    rooms = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in FILES} - {"__init__", "__main__"}
    assert rooms <= set(ORDER)


@pytest.mark.parametrize("path", [path for path in FILES if path.parent.name != "recipes"], ids=lambda p: p.stem)
def test_no_other_room_writes_a_recipes_name(path: Path) -> None:
    texts = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
    assert not texts & set(kl.recipes.names())


@pytest.mark.parametrize("module", ["kilolayer", "kilolayer.config", "kilolayer.recipes", "kilolayer.models.config"])
def test_configuration_and_constants_import_no_torch(module: str) -> None:
    probe = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


def test_every_public_name_resolves() -> None:
    assert all(getattr(kl, name) is not None for name in kl.__all__)
    assert set(kl.__all__) < set(dir(kl))
    with pytest.raises(AttributeError, match="no attribute 'Encodr'"):
        kl.Encodr  # noqa: B018  # pyright: ignore


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_public_definitions_are_documented(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node) or any("Protocol" in ast.unparse(base) for base in getattr(node, "bases", [])), (
                node.name
            )
