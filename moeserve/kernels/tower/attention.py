"""Launches the attention of `warpgroups.py`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from moeserve.kernels.launch import warpgroups

# Patches from which it is faster than cuDNN's: an H200 takes 0.22 ms for 4,096 with heads of 72 (cuDNN's 0.23), 0.72
# for 8,192 (0.84), but 0.10 for 2,048 (0.07), whose programs do not fill it (docs/results/gpu-engine.md).
LEAST_PATCHES: Final = 4096
LEAST_DIM: Final = 65  # numbers of a head; another kernel pads less below, and this one has no room above
MOST_DIM: Final = 80
PART: Final = 64
KEYS: Final = 128
STAGES: Final = 2
ROWS: Final = 64  # queries of an attending warpgroup
ATTENDING: Final = 224
COPYING: Final = 56
LOG2E: Final = 1.4426950408889634


def takes(packed: Tensor) -> bool:
    """Returns whether `attention` is the fastest kernel for `packed`'s number of patches, head width and dtype on this
    GPU. packed: q, k and v, [3, patches, heads, dim] as `attention` takes them."""
    _, patches, _, dim = packed.shape
    is_width = LEAST_DIM <= dim <= MOST_DIM and dim % 8 == 0
    is_16_bits = packed.dtype in (torch.float16, torch.bfloat16)
    return patches >= LEAST_PATCHES and is_width and is_16_bits and warpgroups()


def attention(packed: Tensor, scale: float | None = None) -> Tensor:
    """Attention in which all patches see each other. packed: q, k and v [3, patches, heads, dim], contiguous; scale: 1
    / sqrt(dim) if None. Returns [patches, heads * dim] in the same dtype."""
    from moeserve.kernels.tower.warpgroups import tower_attention

    _, patches, heads, dim = packed.shape
    q, keys, values = packed.flatten(2)
    out = torch.empty_like(q)
    factor = LOG2E * (dim**-0.5 if scale is None else scale)
    count = _count(patches, packed.device)
    tower_attention(
        (-(-patches // (2 * ROWS)), heads),
        q,
        *(_boxes(each, width) for each in (keys, values) for width in (PART, 16)),
        count,
        out,
        heads * dim,
        dim,
        factor,
        KEYS,
        STAGES,
        ROWS,
        ATTENDING,
        COPYING,
        num_warps=4,
    )
    return out


@lru_cache(64)
def _count(patches: int, device: torch.device) -> Tensor:
    return torch.tensor([patches], dtype=torch.int32, device=device)


def _boxes(rows: Tensor, width: int) -> Any:
    """Describes boxes of KEYS rows and `width` columns. rows [patches, heads * dim]."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from moeserve.kernels.attention.boxes import TYPES

    layout = gl.NVMMASharedLayout.get_default_for([KEYS, width], TYPES[rows.dtype])
    return TensorDescriptor.from_tensor(rows, [KEYS, width], layout)
