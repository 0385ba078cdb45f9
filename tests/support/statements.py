"""The statements of a module, without their expressions: most of a syntax tree, which some searches need not see."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    """A file's syntax tree, which several searches read."""
    return ast.parse(path.read_text())


# What has statements and is none itself.
_HOLDERS = (ast.excepthandler, ast.match_case)


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Every statement within a node, at any depth."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
            yield from statements(child)
        elif isinstance(child, _HOLDERS):
            yield from statements(child)
