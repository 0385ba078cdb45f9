"""Generated source as Triton functions.

Triton reads a function's source through `inspect`, which takes it from `linecache`: no file is written. The source is
made from expressions of this program alone, never from data.
"""

from __future__ import annotations

import hashlib
import linecache
from typing import Any

import triton

from moeserve.kernels.launch import Kernel
from moeserve.kernels.operators.pointwise.source import KernelKind
from moeserve.kernels.operators.pointwise.typing_rules import NUMBER


def kernel_of(name: str, source: str, kind: KernelKind) -> Kernel:
    """The kernel `name` of `source.kernel_source`. A number's value is nothing that Triton compiles it for."""
    numbers = [f"x{i}" for i, argument in enumerate(kind.arguments) if argument.rank == NUMBER]
    return Kernel(triton.jit(_function_of(name, source), do_not_specialize=numbers))


def _function_of(name: str, source: str) -> Any:
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    file = f"<moeserve.kernels.operators.pointwise {name} {digest}>"
    # Without a modification time linecache does not look for the file.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module: dict[str, Any] = {"__name__": "moeserve.kernels.operators.pointwise.generated"}
    # Not this file's own `from __future__ import annotations`: Triton would not know the numbers' types, quoted.
    exec(compile(source, file, "exec", dont_inherit=True), module)
    return module[name]
