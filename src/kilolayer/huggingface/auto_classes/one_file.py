"""Write classes of this package, and all that they use, as the source of one module that does not import the package.

Modules are concatenated, each after those that it uses, so that every name is defined before it is needed. Of each module only
the definitions that are used are taken, with the comments above them; other statements are left out.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import symtable
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from kilolayer.errors import InputError

PACKAGE = __name__.partition(".")[0]
GIVEN = {*vars(builtins), "__name__", "__file__"}
"""The names that every module has."""


class Home(NamedTuple):
    """Where something is defined: a module, and a name in it; without a name, the module itself."""

    module: str
    name: str = ""


@dataclass(frozen=True)
class Definition:
    """A statement at the top of a module that defines `names`.

    uses: the names from elsewhere that it refers to; those of modules also with their attributes, such as `recipes.get`.
    local: its local names, and the keywords in its calls.
    """

    text: str
    names: tuple[str, ...]
    uses: frozenset[str]
    local: frozenset[str]


@dataclass
class Source:
    """A module. definitions: in order. imports: where imported names come from."""

    definitions: list[Definition] = field(default_factory=list)
    imports: dict[str, Home] = field(default_factory=dict)

    def find(self, name: str) -> Definition | None:
        """The definition of a name."""
        return next((each for each in self.definitions if name in each.names), None)


def one_file(roots: Sequence[Home], stand_ins: Mapping[str, str]) -> str:
    """The source of a module with `roots` and all that they use. It imports other packages.

    The modules of the roots are taken apart like those of this package, whatever their names are. The roots keep their names;
    any other may be changed, if two modules have the same. stand_ins: modules that stand in for others.
    """
    return _Collection(roots, stand_ins).text()


class _Collection:
    """All definitions to be written: by their home, the homes of the names that they use."""

    def __init__(self, roots: Sequence[Home], stand_ins: Mapping[str, str]) -> None:
        self.roots, self.stand_ins = roots, stand_ins
        self.uses: dict[Home, dict[str, Home]] = {}
        waiting = [*roots]
        while waiting:
            home = waiting.pop()
            if home in self.uses:
                continue
            definition = read(home.module).find(home.name)
            if definition is None:
                raise InputError(
                    f"{home.name!r} is not defined at the top of the module", where=home.module, fix="define it there"
                )
            found = {name: self.resolve(home.module, name) for name in sorted(definition.uses)}
            self.uses[home] = {name: there for name, there in found.items() if there is not None}
            waiting += [there for there in self.uses[home].values() if self.is_own(there.module)]
            waiting += [Home(home.module, name) for name in definition.names]

    def is_own(self, module: str) -> bool:
        """Whether a module is taken apart, rather than imported."""
        return module.partition(".")[0] == PACKAGE or any(root.module == module for root in self.roots)

    def resolve(self, module: str, name: str) -> Home | None:
        """The home of a name in a module, or of an attribute of a module; None if it is neither, or every module has it."""
        source, (first, _, rest) = read(module), name.partition(".")
        if source.find(first):
            return None if rest else Home(module, first)
        if first in source.imports:
            home = source.imports[first]
        elif first in GIVEN:
            return None
        else:
            raise InputError(
                f"{first!r} is neither defined nor imported at the top of the module", where=module, fix="do so there"
            )
        if not self.is_own(home.module):
            return None if rest else home
        inner = ".".join(filter(None, home))
        if _is_module(inner):
            return self.resolve(self.stand_ins.get(inner, inner), rest) if rest else None
        return None if rest else self.resolve(self.stand_ins.get(home.module, home.module), home.name)

    def text(self) -> str:
        """The imports of other packages, then the definitions, module by module."""
        names = self._names()
        parts = [
            "from __future__ import annotations\n",
            *_imports({h: name for h, name in names.items() if not self.is_own(h.module)}),
        ]
        for module in self._in_order():
            used = [each for each in read(module).definitions if Home(module, each.names[0]) in self.uses]
            parts += [f"\n\n# {module}", *(self._renamed(module, each, names) for each in used)]
        return "\n".join(parts) + "\n"

    def _names(self) -> dict[Home, str]:
        """A name for each home: its own, except where another already has it; the roots come first, then this package."""
        wanted = {root: root.name for root in self.roots}
        for home in sorted(self.uses, key=lambda home: (home.module.partition(".")[0] != PACKAGE, home)):
            wanted.setdefault(home, home.name)
            for name, there in self.uses[home].items():
                if not self.is_own(there.module):
                    wanted.setdefault(there, name)
        names: dict[Home, str] = {}
        for home, name in wanted.items():
            taken, prefix = {*names.values()}, home.module.split(".")
            while name in taken:
                name = f"{prefix.pop()}_{name}"
            names[home] = name
        return names

    def _in_order(self) -> list[str]:
        """The modules, each after those that it uses."""
        used: dict[str, dict[str, None]] = {}
        for home, uses in self.uses.items():
            used.setdefault(home.module, {}).update(dict.fromkeys(there.module for there in uses.values()))
        seen: set[str] = set()

        def visit(module: str) -> Iterator[str]:
            if module in used and module not in seen:
                seen.add(module)
                for each in used[module]:
                    yield from visit(each)
                yield module

        return [module for root in self.roots for module in visit(root.module)]

    def _renamed(self, module: str, definition: Definition, names: dict[Home, str]) -> str:
        uses = {**self.uses[Home(module, definition.names[0])], **{name: Home(module, name) for name in definition.names}}
        text = definition.text
        for name, home in sorted(uses.items(), reverse=True):  # `recipes.get` before `recipes`
            if names[home] != name:
                if name in definition.local:
                    raise InputError(f"{name!r} is also a local name in {definition.names[0]!r}", where=module, fix="rename it")
                text = re.sub(rf"(?<![\w.\"']){re.escape(name)}(?!\w)", names[home], text)
        return text


def _imports(names: dict[Home, str]) -> list[str]:
    """The statements that import these homes by these names."""
    whole = [f"import {module}" + f" as {name}" * (module != name) for (module, own), name in names.items() if not own]
    parts: dict[str, list[str]] = {}
    for (module, own), name in names.items():
        if own:
            parts.setdefault(module, []).append(own + f" as {name}" * (own != name))
    return sorted(whole) + [f"from {module} import {', '.join(sorted(parts[module]))}" for module in sorted(parts)]


@cache
def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False


@cache
def read(module: str) -> Source:
    """The definitions and imports of a module."""
    try:
        code = inspect.getsource(import_module(module))
    except (OSError, TypeError):
        raise InputError("the source of the module cannot be read", where=module, fix="put what is in it into a file") from None
    lines, found, end = code.splitlines(), Source(), 0
    for statement in ast.parse(code).body:
        match statement:
            case ast.Import() | ast.ImportFrom():
                found.imports |= _imported(statement)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                for each in statement.body:
                    found.imports |= _imported(each)
            case ast.Expr(value=ast.Constant(value=str())) if found.definitions:  # the docstring of a constant
                last = found.definitions.pop()
                found.definitions.append(replace(last, text=f"{last.text}\n{ast.get_source_segment(code, statement)}"))
            case _ if names := _defined(statement):
                text = "\n".join(lines[end : statement.end_lineno])
                found.definitions.append(Definition(text, names, *_references(text)))
            case _:
                pass
        end = statement.end_lineno or end
    return found


def _imported(statement: ast.stmt) -> dict[str, Home]:
    match statement:
        case ast.Import(names=names):
            return {
                each.asname or each.name.partition(".")[0]: Home(each.name if each.asname else each.name.partition(".")[0])
                for each in names
            }
        case ast.ImportFrom(module=str(module), names=names, level=0) if module != "__future__":
            return {each.asname or each.name: Home(module, each.name) for each in names}
        case _:
            return {}


def _defined(statement: ast.stmt) -> tuple[str, ...]:
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return (name,)
        case ast.Assign(targets=targets):
            return tuple(node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            return (name,)
        case _:
            return ()


def _references(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """The names that a statement takes from elsewhere, dotted ones too, and its local names, with the keywords in its calls."""
    top = symtable.symtable(text, "", "exec")
    inner = [symbol for table in _below(top) for symbol in table.get_symbols()]
    # Not is_global, which is true for every name in a function that is called "top".
    local = {symbol.get_name() for symbol in inner if symbol.is_local() or symbol.is_free()}
    uses = {symbol.get_name() for symbol in inner if not symbol.is_local() and not symbol.is_free()}
    uses |= {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}
    nodes = [*ast.walk(ast.parse(text))]
    dotted = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    uses |= {name for name in dotted if re.fullmatch(r"[\w.]+", name) and name.partition(".")[0] in uses}
    return frozenset(uses), frozenset(local | {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg})


def _below(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for each in table.get_children():
        yield each
        yield from _below(each)
