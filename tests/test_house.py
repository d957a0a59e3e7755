"""The order of the house: which room may import which, and what no room may do."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

import pytest

import kilolayer as kl

SOURCE = Path(kl.__file__).parent
# Each room may import the rooms before it.
ORDER = [
    "version",
    "renamed",
    "foreign_options",
    "errors",
    "importing",
    "torch_state",
    "terminal",
    "hints",
    "display",
    "files",
    "config",
    "parallel",
    "recipes",
    "layers",
    "moe",
    "models",
]
ORDER += [
    "runtime",
    "optimizers",
    "data",
    "generate",
    "speed",
    "evaluate",
    "tasks",
    "report",
    "huggingface",
    "auto_classes",
    "runs",
    "training",
    "probe",
    "compare",
    "reproduce",
    "cli",
]
FILES = sorted(SOURCE.rglob("*.py"))


def is_of_a_task(path: Path) -> bool:
    """Whether a file is in the folder of one task, like a user's package: it may import every room, and none imports it."""
    return path.parent.parent == SOURCE / "tasks"


def room(module: str) -> str:
    """The first part below the package: kilolayer.layers.norm is in layers."""
    return module.split(".")[1] if "." in module else ""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(parsed(path)))


def imports(path: Path) -> set[str]:
    """The modules of this package that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "kilolayer" else {node.module}
    return {name for name in found if name.startswith("kilolayer.")}


def test_imports_run_one_way() -> None:
    for path in [path for path in FILES if (path.parent != SOURCE or path.stem in ORDER) and not is_of_a_task(path)]:
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for module in imports(path):
            if room(module) in ORDER:
                assert ORDER.index(room(module)) <= ORDER.index(own), f"{path.name} imports {module}"


def test_nothing_imports_the_folder_of_a_task() -> None:
    folders = tuple(f"kilolayer.tasks.{path.name}" for path in (SOURCE / "tasks").iterdir() if path.is_dir())
    for path in FILES:
        own = module_name(path) if is_of_a_task(path) else ""
        for module in imports(path):
            assert not module.startswith(folders) or own.split(".")[:3] == module.split(".")[:3], f"{path} imports {module}"


def test_only_the_choice_of_a_runtime_imports_what_is_fast() -> None:
    """And the package, which names `kl.fast` and `kl.record` and imports them on first use."""
    outside = [path for path in FILES if path.relative_to(SOURCE).parts[0] != "speed"]
    importers = {path.relative_to(SOURCE).as_posix() for path in outside if "speed" in {room(each) for each in imports(path)}}
    assert importers == {"__init__.py", "runs/chosen_runtime.py"}


def module_name(path: Path) -> str:
    """layers/norm.py is kilolayer.layers.norm, layers/__init__.py is kilolayer.layers."""
    return ".".join(["kilolayer", *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")


def imported_files(path: Path, modules: Collection[str]) -> list[str]:
    """As `imports`, but file by file: `from kilolayer.speed.operators import kernels` imports speed/operators/kernels.py."""
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else node.module for name in names}
    return sorted(found & set(modules))


def find_circle(imports_of: Mapping[str, list[str]]) -> list[str] | None:
    """Modules that import each other, the first one again at the end; depth-first, each module once."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str] | None:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        done.add(module)
        return next(filter(None, (visit(other, [*path, module]) for other in imports_of[module])), None)

    return next(filter(None, (visit(module, []) for module in imports_of)), None)


def test_no_files_import_each_other() -> None:
    paths = {module_name(path): path for path in FILES}
    circle = find_circle({name: imported_files(path, paths) for name, path in paths.items()})
    assert circle is None, " -> ".join(circle or [])


def test_a_circle_is_named() -> None:
    line = {"a": ["b", "c"], "b": ["d"], "c": ["b", "d"], "d": []}
    assert find_circle(line) is None
    assert find_circle({**line, "d": ["c"]}) == ["b", "d", "c", "b"]
    assert find_circle({"a": ["a"]}) == ["a", "a"]


def test_every_room_has_its_place() -> None:
    rooms = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in FILES} - {"__init__", "__main__"}
    assert rooms <= set(ORDER)


# Reproductions name the methods that a paper compares, and other libraries have options for some.
def test_no_other_room_writes_a_recipes_name() -> None:
    for path in [path for path in FILES if path.parent.name not in ("recipes", "reproduce") and path.stem != "foreign_options"]:
        texts = {node.value for node in nodes_of(path) if isinstance(node, ast.Constant)}
        assert not texts & set(kl.recipes.names()), path


# What is typed in other programs, and how the command itself is started.
TYPED_ELSEWHERE = ("data/tokenizer.py", "data/vocabulary.py", "parallel/processes.py", "compare/queue.py")
TYPED_ELSEWHERE += ("tasks/causal_lm/__init__.py", "config.py", "hints.py")
TYPED = re.compile(r"(^|[\s`]|(?<!var)\()--[a-z]|`kilolayer ")


def test_errors_leave_the_words_of_the_shell_to_the_hints() -> None:
    for path in FILES:
        own = path.relative_to(SOURCE).as_posix()
        is_verb = is_of_a_task(path) and "import argparse" in path.read_text()
        if own.startswith(("cli/", "reproduce/")) or own in TYPED_ELSEWHERE or is_verb:
            continue
        used = (node for node in nodes_of(path) if isinstance(node, ast.Assign | ast.Call | ast.Return))
        texts = {part.value for node in used for part in ast.walk(node) if isinstance(part, ast.Constant)}
        assert not [text for text in texts if isinstance(text, str) and TYPED.search(text)], own


@pytest.mark.parametrize("module", ["kilolayer", "kilolayer.config", "kilolayer.recipes", "kilolayer.models.config"])
def test_configuration_and_constants_import_no_torch(module: str) -> None:
    probe = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


def test_every_public_name_resolves() -> None:
    assert all(getattr(kl, name) is not None for name in kl.__all__)
    assert set(kl.__all__) < set(dir(kl))
    with pytest.raises(AttributeError, match="no attribute 'Encodr'"):
        kl.Encodr  # noqa: B018  # pyright: ignore


IMPORT_EVERYTHING = """
import importlib, importlib.util, inspect, pkgutil
import kilolayer as kl

needs = {"_kernel": "triton", ".harness": "lm_eval"}
absent = tuple(name for name, package in needs.items() if importlib.util.find_spec(package) is None)
for module in pkgutil.walk_packages(kl.__path__, "kilolayer."):
    if not module.name.endswith(("__main__", *absent)):
        importlib.import_module(module.name)
for name in kl.__all__:
    public = getattr(kl, name)
    is_room = name in ("optimizers", "recipes", "tasks")
    assert inspect.ismodule(public) if is_room else inspect.isfunction(public) or inspect.isclass(public), name
    assert is_room or public.__name__ == name
model = kl.build_model(kl.ModelConfig(layers=1, dim=8, heads=2, ffn_dim=16, vocab_size=9, recipe=kl.recipes.get("pre_ln")))
assert isinstance(model, kl.EncoderDecoder)
"""


@pytest.mark.slow
def test_no_submodule_takes_the_place_of_a_public_name() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_EVERYTHING], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_definitions_are_documented() -> None:
    for path in FILES:
        tree = parsed(path)
        assert ast.get_docstring(tree), path
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                is_protocol = any("Protocol" in ast.unparse(base) for base in getattr(node, "bases", []))
                assert ast.get_docstring(node) or is_protocol, f"{path}: {node.name}"
