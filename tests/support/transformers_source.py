"""Single functions of transformers whose modules import libraries that tests do not need."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def function_of(path: str, name: str) -> Callable[..., Any]:
    """A function of `transformers/models/PATH` that uses nothing but arithmetic."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "models" / path).read_text())
    (found,) = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name]
    names: dict[str, Any] = {"math": math}
    exec(compile(ast.Module([found], []), path, "exec"), names)
    function: Callable[..., Any] = names[name]
    return function
