"""Nothing that can run code from bytes is imported or called anywhere in the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "moeserve"
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle"}
UNSAFE_CALLS = {"eval", "exec", "compile", "send_pyobj", "recv_pyobj", "__import__"}
# Makes a function of source that this package has written: Triton reads kernels as functions. No data gets into it
# (`test_another_number_is_no_other_kernel`).
GENERATED = "kernels/operators/pointwise/generated.py"
UNSAFE_TRUE = {"allow_pickle", "trust_remote_code", "shell"}


# Every finding looks like this as text: a module without any needs no parsing.
SUSPICIOUS = re.compile(
    "|".join(
        [
            *UNSAFE_MODULES,
            *UNSAFE_TRUE,
            r"pyobj\b",
            r"torch\s*\.\s*load",
            rf"(?<![.\w])({'|'.join(UNSAFE_CALLS)})\s*\(",
        ]
    )
)


def findings(source: str) -> list[str]:
    """What is unsafe in a module's source, with its line."""
    if not SUSPICIOUS.search(source):
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                bad = [alias.name for alias in names if alias.name.split(".")[0] in UNSAFE_MODULES]
            case ast.ImportFrom(module=str(module)):
                bad = [module] if module.split(".")[0] in UNSAFE_MODULES else []
            case ast.Call(func=ast.Name(id=name)):
                bad = [name] if name in UNSAFE_CALLS else []
            case ast.Call(func=ast.Attribute(attr=name, value=ast.Name(id=owner))):
                bad = [name] if name.endswith("pyobj") or (owner == "torch" and name == "load") else []
            case ast.keyword(arg=str(name), value=ast.Constant(value=True)):
                bad = [name] if name in UNSAFE_TRUE else []
            case _:
                continue
        found += [f"line {node.lineno}: {name}" for name in bad]
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "eval('1')",
        "socket.recv_pyobj()",
        "torch.load('x')",
        "np.load('x', allow_pickle=True)",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert findings(source)


def test_package_is_free_of_unsafe_decoders() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert files
    found = {str(file.relative_to(PACKAGE)): findings(file.read_text()) for file in files}
    generated = found.pop(GENERATED)
    assert [what.partition(": ")[2] for what in generated] == ["exec", "compile"]
    assert {file: bad for file, bad in found.items() if bad} == {}
