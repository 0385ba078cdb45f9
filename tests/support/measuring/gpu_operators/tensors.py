"""Tensors without data, as an operator's arguments."""

from __future__ import annotations

import torch

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.planes import empty_planes
from moeserve.quantization.quant_type import QuantType
from moeserve.quantization.table import IQ4_XS, Q4_K, Q6_K

# Short, for lists of calls.
Q4, Q6, IQ4 = Q4_K, Q6_K, IQ4_XS
f32, i32 = torch.float32, torch.int32


def empty(*shape: int, dtype: torch.dtype = f32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def weight(kind: QuantType, *shape: int) -> list[torch.Tensor]:
    p = empty_planes(kind, shape, "meta")
    return [p.codes, p.scales, p.supers]


def both(n: int, cols: int, dtype: torch.dtype = f32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Activations: numbers, and their codes and scales."""
    a = GpuActivations.empty(n, cols, "meta", dtype=dtype, quantised=True)
    assert a.x is not None
    assert a.codes is not None
    assert a.scales is not None
    return a.x, a.codes, a.scales
