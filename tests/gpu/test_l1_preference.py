"""Launches that prefer L1 cache run a kernel that CUDA's driver knows to prefer it, others the same kernel without."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext

import pytest
import torch

from moeserve.kernels.l1_preference import L1_ROWS, PREFERRED_SHARED_MEMORY_CARVEOUT, driver
from moeserve.kernels.launch import compile_ahead
from moeserve.kernels.norm.op import add_norm
from moeserve.kernels.norm.triton import add_norm_kernel

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="no Hopper GPU"
)


def preferences() -> list[int]:
    """Returns what the driver holds for each kind of launch of the norm, in order."""
    found = []
    for compiled in add_norm_kernel._compiled.values():
        value = ctypes.c_int(-2)
        function = ctypes.c_void_p(compiled.function)
        error = driver().cuFuncGetAttribute(ctypes.byref(value), PREFERRED_SHARED_MEMORY_CARVEOUT, function)
        assert not error
        found.append(value.value)
    return found


def norm(rows: int, cols: int) -> torch.Tensor:
    x, y = torch.full((rows, cols), 3.0, device="cuda"), torch.zeros(rows, cols, device="cuda")
    count = torch.tensor([rows], dtype=torch.int32, device="cuda")
    add_norm(x, None, None, None, None, None, count, torch.ones(cols, device="cuda"), 1e-6, y, None, None)
    return y


@pytest.mark.parametrize(("is_ahead", "cols"), [(False, 96), (True, 160)])
def test_norms_of_few_rows_prefer_l1(is_ahead: bool, cols: int) -> None:
    add_norm_kernel._compiled.clear()
    sizes = (2, L1_ROWS + 1)
    with compile_ahead() if is_ahead else nullcontext():
        for rows in sizes:
            norm(rows, cols)
    assert preferences() == [0, -1]
    for rows in sizes:
        assert (norm(rows, cols) - 1).abs().max() < 1e-6
