"""docs/reference/operators/: a page for each operator of moeserve/kernels/operators/catalogue.py."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INDEX = """\
The kernels are PyTorch operators: `import moeserve.kernels.operators` registers `torch.ops.moeserve.*`, without the
server. They run C++ on CPU tensors and Triton on CUDA tensors, and have meta functions for `torch.compile`.
[use-the-operators.md](../../how-to/use-the-operators.md) shows their use.
""".splitlines()


def operator_pages(repository: Path) -> Iterator[tuple[str, list[str]]]:
    """(name, lines) of the index and of each operator's page, the title first."""
    # By its path: importing its package would import torch, which the generator does without.
    operators = runpy.run_path(str(repository / "moeserve/kernels/operators/catalogue.py"))["OPERATORS"]
    rows = [f"| [{name}]({name}.md) | {operator.does} |" for name, operator in operators.items()]
    yield "README", ["# Operators", "", *INDEX, "", "| operator | computes |", "|---|---|", *rows]
    for name, operator in operators.items():
        yield name, _page(name, operator)


def _page(name: str, operator: Any) -> list[str]:
    rows = [
        f"| `{argument}` | {_form(a)} | {a.meaning}{' (on the CPU)' if a.cpu else ''} |"
        for argument, a in operator.arguments.items()
    ]
    source = [f"Published: {operator.source}.", ""] if operator.source else []
    return [
        f"# torch.ops.moeserve.{name}", "", operator.does, "",
        "```", f"{name}{operator.schema}", "```", "",
        "| argument | type and shape | |", "|---|---|---|", *rows, "",
        f"Gives: {operator.gives}.".replace("..", "."), "",
        f"Raises: {operator.raises}", "",
        f"Specification: `{operator.reference}`.", *source, "",
        "```python", *operator.example.rstrip().splitlines(), "```",
    ]  # fmt: skip


def _form(argument: Any) -> str:
    form: str = argument.form
    return {"any": "tensor", "weight": "weight, of `operators.weight`"}.get(form, form)
