"""Generated source as Triton functions.

Triton reads a function's source through `inspect`, which takes it from `linecache`: no file is written. The source is
made from expressions of this program alone, never from data.
"""

from __future__ import annotations

import hashlib
import linecache
from typing import Any

import torch
import triton

from moeserve.kernels.launch import Kernel
from moeserve.kernels.pointwise.expression import Expression
from moeserve.kernels.pointwise.source import KernelKind, device_source
from moeserve.kernels.pointwise.typing_rules import NUMBER


def kernel_of(name: str, source: str, kind: KernelKind) -> Kernel:
    """The kernel `name` of `source.kernel_source`. A number's value is nothing that Triton compiles it for."""
    numbers = [f"x{i}" for i, argument in enumerate(kind.arguments) if argument.rank == NUMBER]
    return Kernel(triton.jit(_function_of(name, source), do_not_specialize=numbers))


def device_function(expression: Expression, dtype: torch.dtype = torch.float32) -> Any:
    """The expression as a `triton.jit` function of tiles of `dtype`, for hand-written kernels to call."""
    name = f"{expression.name}_of_tiles"
    return triton.jit(_function_of(name, device_source(name, expression, dtype)))


def _function_of(name: str, source: str) -> Any:
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    file = f"<moeserve.kernels.pointwise {name} {digest}>"
    # Without a modification time linecache does not look for the file.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module: dict[str, Any] = {"__name__": "moeserve.kernels.pointwise.generated"}
    # Not this file's own `from __future__ import annotations`: Triton would not know the numbers' types, quoted.
    exec(compile(source, file, "exec", dont_inherit=True), module)
    return module[name]
