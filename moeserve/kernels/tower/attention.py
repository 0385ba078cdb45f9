"""Launches the attention of `warpgroups.py`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from moeserve.kernels.launch import warpgroups

LEAST_DIM: Final = 65  # numbers of a head; another kernel pads less below, and this one has no room above
MOST_DIM: Final = 80
PART: Final = 64
KEYS: Final = 128
STAGES: Final = 2
ROWS: Final = 64  # queries of an attending warpgroup
ATTENDING: Final = 224
COPYING: Final = 56
LOG2E: Final = 1.4426950408889634


def takes(dim: int, dtype: torch.dtype) -> bool:
    """Returns whether `attention` computes heads of this width on this GPU."""
    is_width = LEAST_DIM <= dim <= MOST_DIM and dim % 8 == 0
    return is_width and dtype in (torch.float16, torch.bfloat16) and warpgroups()


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
