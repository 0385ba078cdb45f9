"""Launches piecewise attention and its gradients: torch.ops.moeserve.piecewise_attention on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.launch import Kernel, next_power_of_2
from moeserve.kernels.operators.piecewise.backward import keys_kernel, queries_kernel
from moeserve.kernels.operators.piecewise.check import check
from moeserve.kernels.operators.piecewise.forward import forward_kernel


@dataclass(frozen=True, slots=True)
class PiecewiseTile:
    rows: int  # query rows (or keys, backward) per program
    block: int  # keys (or query rows) at a time
    mixed: int  # the same where both products are needed
    warps: int
    stages: int


HALF = {128: PiecewiseTile(128, 128, 64, 8, 2), 256: PiecewiseTile(64, 64, 32, 4, 2)}  # by head width
# With few queries, programs spend much of their time starting and ending; two programs per multiprocessor overlap.
# At 2,048 positions that gives 0.82 to 0.87 of ordinary attention's rate instead of 0.74 to 0.85; at 8,192 it gives
# 0.90 to 0.95 instead of 0.98 to 1.05.
FEW_ROWS = 2048
HALF_FEW = {**HALF, 128: PiecewiseTile(64, 64, 64, 4, 2)}
HALF_GRADIENTS = {128: PiecewiseTile(64, 64, 64, 8, 2), 256: PiecewiseTile(32, 32, 32, 4, 1)}
# A float32 product takes three tensor core products (`tf32x3`).
FLOAT = {128: PiecewiseTile(32, 32, 32, 4, 1), 256: PiecewiseTile(16, 16, 16, 4, 1)}


def forward(
    q1: Tensor,
    k1: Tensor,
    q2: Tensor,
    k2: Tensor,
    v: Tensor,
    distance: int,
    causal: bool,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the result in q1's dtype, and the logsumexp in float32, as specified in reference.py.

    All tensors have the same dtype, float16, bfloat16 or float32; tensors that are not contiguous are copied. Raises
    ValueError for shapes that do not match, a head wider than 256, or a negative distance.
    """
    check(q1, k1, q2, k2, v, distance)
    q1, k1, q2, k2, v = (x.contiguous() for x in (q1, k1, q2, k2, v))
    batch, heads, m, _ = q1.shape
    out, lse = torch.empty_like(q1), torch.empty(q1.shape[:3], dtype=torch.float32, device=q1.device)
    if out.numel() == 0:
        return out, lse
    tile = (FLOAT if q1.dtype == torch.float32 else HALF_FEW if m <= FEW_ROWS else HALF)[_width(q1)]
    _launch(
        forward_kernel, (-(-m // tile.rows), batch * heads), (q1, k1, q2, k2, v, out, lse),
        (m, v.shape[2], distance), (*_shape(q1, v), tile.rows, tile.block, tile.mixed, causal, _scale(scale, q1)), tile,
    )  # fmt: skip
    return out, lse


def backward(
    inputs: tuple[Tensor, ...],
    out: Tensor,
    lse: Tensor,
    out_gradient: Tensor,
    distance: int,
    causal: bool,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Returns the gradients of q1, k1, q2, k2 and v, in their dtype, from `forward`'s results and the gradient of
    the first."""
    q1, k1, q2, k2, v = inputs = tuple(x.contiguous() for x in inputs)
    out_gradient = out_gradient.contiguous()
    delta = (out.float() * out_gradient.float()).sum(-1)
    dq1, dk1, dq2, dk2, dv = gradients = tuple(torch.zeros_like(x) for x in inputs)
    if out.numel() == 0 or v.numel() == 0:
        return gradients
    (batch, heads, m, _), (_, kv_heads, n, _) = q1.shape, v.shape
    tile = (FLOAT if q1.dtype == torch.float32 else HALF_GRADIENTS)[_width(q1)]
    given, lengths = (q1, k1, q2, k2, v, out_gradient, lse, delta), (m, n, distance)
    constants = (*_shape(q1, v), tile.rows, tile.block, causal, _scale(scale, q1))
    _launch(
        keys_kernel, (-(-n // tile.rows), batch * kv_heads), (*given, dk1, dk2, dv), lengths, constants, tile
    )
    _launch(queries_kernel, (-(-m // tile.rows), batch * heads), (*given, dq1, dq2), lengths, constants, tile)
    return gradients


def _width(q: Tensor) -> int:
    return 128 if q.shape[3] <= 128 else 256


def _shape(q: Tensor, v: Tensor) -> tuple[int, int, int]:
    """Returns the query heads per KV head, the head width, and a power of two that holds it."""
    return q.shape[1] // v.shape[1], q.shape[3], max(16, next_power_of_2(q.shape[3]))


def _scale(scale: float | None, q: Tensor) -> float:
    return q.shape[3] ** -0.5 if scale is None else scale


def _launch(
    kernel: Kernel,
    grid: tuple[int, ...],
    tensors: tuple[Tensor, ...],
    lengths: tuple[int, ...],
    constants: tuple[object, ...],
    tile: PiecewiseTile,
) -> None:
    """Launches the kernel. Lengths are passed so that no new kernel is compiled for other lengths."""
    kinds = [(x.dtype, x.data_ptr() & 15) for x in tensors]
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    kernel.launch((*kinds, *constants), grid, (*tensors, *lengths, *constants), options)
