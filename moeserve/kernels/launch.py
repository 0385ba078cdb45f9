"""Launching Triton kernels at a few microseconds a call.

Triton's own `kernel[grid](...)` binds and specialises its arguments anew at every call. Here the compiled kernel is
found by what can make it another one: the compile-time arguments, the tensors' types and alignment, the launch options
(the idea is FlagGems' LibEntry). Kernels take no runtime integers, which Triton would specialise on: an argument is a
tensor or compile-time.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
# For kernels: inline assembly, which the interpreter lacks, only where they are compiled.
COMPILED = tl.constexpr(not INTERPRETED)


def _has_dependent_launch() -> bool:
    if INTERPRETED or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] >= 9


# Programmatic dependent launch (Hopper on): a kernel may start while the one before it ends, and waits itself
# (gdc_wait) before it reads what that one wrote.
PDL = _has_dependent_launch()


class Kernel:
    """A jitted function that is launched as kernel(grid, *arguments in order, num_warps=, num_stages=, ...)."""

    def __init__(self, function: Any) -> None:
        # Under the interpreter, `function` is its InterpretedFunction, without a cache.
        self.function = function
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(self, grid: tuple[int, ...], *arguments: object, **options: Any) -> None:
        if INTERPRETED:
            self.function[grid](*arguments, **options)
            return
        device = torch.cuda.current_device()
        kinds = [(a.dtype, a.data_ptr() & 15) if isinstance(a, torch.Tensor) else a for a in arguments]
        key = (device, *kinds, *options.values())
        found = self._compiled.get(key)
        if found is None:
            self._compiled[key] = self.function[grid](*arguments, **options)
            return
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        found.run(x, y, z, stream, found.function, found.packed_metadata, None, None, None, *arguments)


def kernel(function: Any) -> Kernel:
    """Decorator: `@kernel` on a Triton function with neither default values nor runtime scalars."""
    return Kernel(triton.jit(function))


def row_stride(first: torch.Tensor, *others: torch.Tensor | None) -> int:
    """Between the rows of matrices that lie alike, each row contiguous. ValueError where they do not."""
    for tensor in (first, *others):
        if tensor is not None and tensor.stride() != (first.stride(0), 1):
            raise ValueError(f"strides {tensor.stride()} where {(first.stride(0), 1)} are expected")
    return first.stride(0)
