"""The statements of a module, without their expressions: most of a syntax tree, which some searches need not see."""

from __future__ import annotations

import ast
from collections.abc import Iterator

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
