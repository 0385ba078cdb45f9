"""The texts of the errors that can end a start, read from the source."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.rules.statements import statements

PACKAGE = Path(__file__).resolve().parents[3] / "moeserve"
REMEDIED = frozenset({"SettingError"})  # end with a remedy that the class adds
ERRORS = frozenset({"ConfigError", "FileError", "ModelError", "GGUFError", "HubError"}) | REMEDIED
# Not of a server's start.
ELSEWHERE = ("cli/bench/", "cli/plan/", "cli/simulate/", "cli/workload/", "processes/lifecycle.py")
HOLE = "…"


@functools.cache
def texts(errors: frozenset[str] = ERRORS) -> tuple[str, ...]:
    """Each on one line, with … for what it fills in; those that only pass on another's text are left out."""
    return tuple(_texts(errors))


def _texts(errors: frozenset[str]) -> Iterator[str]:
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        if path.relative_to(PACKAGE).as_posix().startswith(ELSEWHERE) or not any(
            error in source for error in errors
        ):
            continue
        for node in statements(ast.parse(path.read_text())):
            # An error that a function returns is raised by its caller.
            error = None
            if isinstance(node, ast.Raise):
                error = node.exc
            elif isinstance(node, ast.Return):
                error = node.value
            if isinstance(error, ast.Call):
                name = error.func.id if isinstance(error.func, ast.Name) else ""
                if name in errors and error.args:
                    text = re.sub(f"{HOLE}+", HOLE, re.sub(r"\s+", " ", _text(error.args[-1])))
                    if re.search(r"[a-z]{3}.*[a-z]{3}", text.replace("MOESERVE", "")):
                        yield text


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + _text(right)
    return HOLE
