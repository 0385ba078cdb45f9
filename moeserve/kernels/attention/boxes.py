"""Descriptors with which the tensor memory accelerator (TMA) copies keys and values into shared memory."""

# mypy: ignore-errors

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def boxes_of(pool: Tensor, rows: int) -> TensorDescriptor:
    """Returns the tensor memory accelerator's description of boxes of `rows` slots of one head, in the layout that
    warpgroups' products read. pool: [slots, heads, width], of 16 bits."""
    _, _, width = pool.shape
    return TensorDescriptor.from_tensor(pool.flatten(1), [rows, width], _layout(rows, width, pool.dtype))


@cache
def _layout(rows: int, width: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, width], TYPES[dtype])
