"""Asks CUDA's driver to run a kernel with as much L1 cache as a multiprocessor can have.

A multiprocessor divides one memory (256 KB on Hopper) between L1 and shared memory. The driver changes the division
between kernels. A kernel without a preference keeps what the one before it left: behind attention or a product with 200
KB of shared memory, 28 KB of L1. Norms, the choice of experts and products of few rows have a preference: decode steps
are up to 1.07 times as fast, and attention in equal shares (attention/shares.py) pays with 2 to 8 rows. The cause may
be the larger L1 cache, or that other kernels no longer share the multiprocessor: it was not measured which. If all
kernels with little shared memory have it, steps of 16 rows and more are slower; so are norms of thousands of rows, of
which fewer run at once then (docs/results/gpu-kernels.md).

https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__EXEC.html (cuFuncSetAttribute)
"""

from __future__ import annotations

import copy
import ctypes
from functools import cache
from typing import Any, Final

# Most rows of a step whose norms and choice of experts have the preference: the most that were measured.
L1_ROWS: Final = 256
PREFERRED_SHARED_MEMORY_CARVEOUT: Final = 9  # of CUfunction_attribute; in percent; -1: no preference


@cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def loaded_for_l1(compiled: Any) -> Any:
    """Loads a compiled kernel of Triton's once more, with the preference, which holds for all launches of the loaded
    copy. Returns it as a further compiled kernel. Raises RuntimeError if the driver refuses."""
    again = copy.copy(compiled)
    again.module = again.function = again._run = None
    again.run  # noqa: B018 - a property that loads
    error = driver().cuFuncSetAttribute(ctypes.c_void_p(again.function), PREFERRED_SHARED_MEMORY_CARVEOUT, 0)
    if error:
        raise RuntimeError(f"cuFuncSetAttribute: CUDA error {error}")
    return again
