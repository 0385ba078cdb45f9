"""What the modules of this repository import, read from their sources."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.rules.model_import_rules import PACKAGE
from tests.support.rules.statements import statements


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Imports(NamedTuple):
    anywhere: frozenset[str]
    at_once: frozenset[str]  # before the module does anything


# Groups: the indentation, and the statement.
IMPORT = re.compile(r"^([ \t]*)((?:import|from [\w.]+ import)\b(?:[^\n(]*\([^)]*\)|[^\n]*))", re.MULTILINE)
TRIPLE_QUOTED = re.compile(r'"{3}.*?"{3}', re.DOTALL)
# What the two patterns above may misread: three quotes in a comment or a string, or of the other kind, and an import
# behind other code, or continued by a backslash.
UNCLEAR = re.compile(
    r"#[^\n]*\"{3}|'\"{3}|'{3}|\\\n|^(?![ \t]*(?:#|import\b|from\b)).*[;:][ \t]*(?:import|from [\w.]+ import)\b"
    r"|^[ \t]*(?:import|from)\b[^\n#]*;",
    re.MULTILINE,
)


@functools.cache
def read_imports(path: Path) -> Imports:
    return imports_in(path.read_text(), path)


def imports_in(source: str, path: Path) -> Imports:
    """The modules that a file of this text imports; `from a import b` is a.b where that is a module. Only what looks
    like an import is parsed, which takes a fifth of the time; the whole file where that is none or unclear."""
    if source.count('"""') % 2 or UNCLEAR.search(source):
        return parsed_imports(source, path)
    found = IMPORT.findall(TRIPLE_QUOTED.sub("", source))
    try:
        anywhere = ast.parse("\n".join(statement for _, statement in found)).body
        at_once = ast.parse("\n".join(statement for indent, statement in found if not indent)).body
    except SyntaxError:
        return parsed_imports(source, path)
    return Imports(frozenset(_imports(path, anywhere)), frozenset(_imports(path, at_once)))


def parsed_imports(source: str, path: Path) -> Imports:
    tree = ast.parse(source)
    return Imports(frozenset(_imports(path, statements(tree))), frozenset(_imports(path, tree.body)))


def imports_of(path: Path) -> frozenset[str]:
    return read_imports(path).anywhere


def _imports(path: Path, nodes: Iterable[ast.AST]) -> Iterator[str]:
    module = name_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{source}.{alias.name}" if is_module(f"{source}.{alias.name}") else source


@functools.cache
def is_module(name: str) -> bool:
    path = PACKAGE.parent / name.replace(".", "/")
    return path.with_suffix(".py").exists() or path.is_dir()


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@functools.cache
def way_to_torch(name: str) -> tuple[str, ...]:
    """The modules through which the import of one of ours imports torch at once, without calling anything; () if none
    does."""
    ways: dict[str, tuple[str, ...]] = {name: (name,)}
    waiting = [name]
    while waiting:
        module = waiting.pop()
        if module.split(".")[0] == "torch":
            return ways[module]
        for found in imported_with(module) - ways.keys():
            ways[found] = (*ways[module], found)
            waiting.append(found)
    return ()


@functools.cache
def imported_with(name: str) -> frozenset[str]:
    """A module's packages, and what it imports before it does anything. Empty for what is neither in moeserve nor in
    tests.support."""
    if not within(name, "moeserve") and not within(name, "tests.support"):
        return frozenset()
    place = PACKAGE.parent / name.replace(".", "/")
    path = place.with_suffix(".py") if place.with_suffix(".py").exists() else place / "__init__.py"
    if not path.exists():
        return frozenset()
    parts = name.split(".")
    packages = {".".join(parts[:count]) for count in range(1, len(parts))}
    return read_imports(path).at_once | packages
