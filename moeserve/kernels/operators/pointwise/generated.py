"""Generated source as Triton functions.

Triton reads a function's source through `inspect`, which finds it in `linecache`: no file is written. The source is
generated only from expressions in this program, never from data.
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
    """Returns the kernel `name` from `source.kernel_source`. The values of its number arguments do not cause
    recompilation."""
    numbers = [f"x{i}" for i, argument in enumerate(kind.arguments) if argument.rank == NUMBER]
    return Kernel(triton.jit(_function_of(name, source), do_not_specialize=numbers))


def _function_of(name: str, source: str) -> Any:
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    file = f"<moeserve.kernels.operators.pointwise {name} {digest}>"
    # Without a modification time, linecache does not check for a file.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module: dict[str, Any] = {"__name__": "moeserve.kernels.operators.pointwise.generated"}
    # Without this file's `from __future__ import annotations`, which would quote the numbers' types and hide them
    # from Triton.
    exec(compile(source, file, "exec", dont_inherit=True), module)
    return module[name]
