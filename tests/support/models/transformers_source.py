"""Single functions of transformers whose modules import libraries that tests do not need."""

from __future__ import annotations

import ast
import math
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch


def function_of(path: str, name: str) -> Callable[..., Any]:
    """A function of `transformers/models/PATH` that needs nothing but arithmetic and torch."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "models" / path).read_text())
    functions = [each for each in tree.body if isinstance(each, ast.FunctionDef)]
    assert name in [each.name for each in functions]
    for each in functions:  # those that it calls, too; their annotations name what is not imported
        each.decorator_list, each.returns = [], None
        for argument in each.args.args:
            argument.annotation = None
    names: dict[str, Any] = {"math": math, "torch": torch, "defaultdict": defaultdict}
    exec(compile(ast.Module([*functions], []), path, "exec"), names)
    function: Callable[..., Any] = names[name]
    return function
