"""Launches the products with a matrix in planes: GEMV for few tokens, GEMM for many."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.launch import PDL
from moeserve.kernels.linear.gemm import gemm_kernel
from moeserve.kernels.linear.gemv import gemv_kernel
from moeserve.kernels.planes.formats import FORMATS, UNIT, Format, GgmlType

GEMV_TOKENS = 4  # above, a dense product is faster on the tensor cores


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix in planes as the kernels take it."""

    codes: Tensor  # int32 view, or floats
    scales: Tensor
    supers: Tensor
    format: Format | None
    rows: int
    cols: int


def weight_of(planes: list[Tensor], kind: int, cols: int) -> Weight:
    """planes: codes, scales, supers of `Planes`."""
    codes, scales, supers = planes
    rows = codes.shape[1]
    form = FORMATS.get(GgmlType(kind))
    if rows * codes[0, 0].nbytes >= 1 << 31:
        raise ValueError(f"a matrix of {rows} rows of {codes[0, 0].nbytes} bytes is too large: 2 GiB at most")
    return Weight(codes if form is None else codes.view(torch.int32), scales, supers, form, rows, cols)


@dataclass(frozen=True, slots=True)
class GemvTile:
    """`linear/gemv.py` has the letters."""

    br: int
    nb: int
    bk: int
    warps: int


def gemv_tile(weight: Weight, *, quantises: bool = False, warps: int = 4, nb: int = 4) -> GemvTile:
    """One unit of one row to a thread; a float matrix in tiles of 8 KiB. `quantises`: a program's rows make groups of 32."""
    if weight.format is None:
        br = 32 if quantises else max(1, min(8, _power_of_two(weight.rows) // 128))
        return GemvTile(
            br, 1, min(_power_of_two(weight.cols), 8192 // (br * weight.codes.element_size())), warps
        )
    units = min(_power_of_two(-(-weight.cols // UNIT)), 32)
    br = 32 * warps // units
    while nb > 1 and br * nb > weight.rows and not (quantises and br * nb <= 32):
        nb //= 2
    if quantises:
        nb = max(nb, 32 // br)
    return GemvTile(br, nb, units * UNIT, warps)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def linear(
    x: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    count: Tensor,
    planes: list[Tensor],
    kind: int,
    cols: int,
    out: Tensor,
) -> None:
    """out[i] = W x[i] for rows i < count[0]. x, codes, scales: GpuActivations; out [n, rows of W]."""
    weight = weight_of(planes, kind, cols)
    if len(out) <= GEMV_TOKENS:
        run_gemv(x, codes, scales, weight, None, None, None, count, out, None, None, top_k=1, block=len(out))
    else:
        assert x is not None
        run_gemm(x, weight, None, None, None, count, out, top_k=1, tile=dense_tile(len(out)))


@dataclass(frozen=True, slots=True)
class GemmTile:
    bm: int  # tokens
    bn: int  # rows of the matrix
    bk: int  # bytes of a quantised row's low part, or columns of a float matrix
    warps: int
    stages: int


def dense_tile(tokens: int) -> GemmTile:
    if tokens <= 64:
        return GemmTile(max(16, _power_of_two(tokens)), 32, 64, 4, 4)
    return GemmTile(128, 128, 64, 8, 3)


def run_gemv(
    x: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    weight: Weight,
    up: Weight | None,
    block_expert: Tensor | None,
    block_routes: Tensor | None,
    count: Tensor,
    out: Tensor | None,
    out_codes: Tensor | None,
    out_scales: Tensor | None,
    *,
    top_k: int,
    block: int,
    tile: GemvTile | None = None,
) -> None:
    """gemv.gemv_kernel with `block` routes (dense: tokens) to a block."""
    t = tile or gemv_tile(weight, quantises=out_codes is not None)
    blocks = 1 if block_expert is None else len(block_expert)
    integer = weight.format is not None or (up is not None and up.format is not None)
    floats = weight.format is None or (up is not None and up.format is None)
    if (integer and codes is None) or (floats and x is None):
        raise ValueError("the activations lack the form that the weight takes")
    gemv_kernel(
        (-(-weight.rows // (t.br * t.nb)), blocks),
        x if floats else None,
        codes.view(torch.int32) if integer and codes is not None else None,
        scales if integer else None,
        weight.codes,
        weight.scales,
        weight.supers,
        None if up is None else up.codes,
        None if up is None else up.scales,
        None if up is None else up.supers,
        block_expert,
        block_routes,
        count,
        out,
        out_codes,
        out_scales,
        weight.rows,
        weight.cols,
        weight.format,
        None if up is None else up.format,
        top_k,
        block,
        t.br,
        t.nb,
        t.bk,
        PDL,
        num_warps=t.warps,
        launch_pdl=PDL,
    )


def _stages(weight: Weight, tile: GemmTile) -> int:
    """2-bit types take the activations of four fields a step: shared memory holds two such stages."""
    two_bits = weight.format is not None and weight.format.low_bits == 2
    return min(tile.stages, 2) if two_bits and tile.bm >= 128 else tile.stages


def run_gemm(
    x: Tensor,
    weight: Weight,
    up: Weight | None,
    block_expert: Tensor | None,
    block_routes: Tensor | None,
    count: Tensor,
    out: Tensor,
    *,
    top_k: int,
    tile: GemmTile,
) -> None:
    """gemm.gemm_kernel with tile.bm routes (dense: tokens) to a block."""
    blocks = -(-len(out) // tile.bm) if block_expert is None else len(block_expert)
    gemm_kernel(
        (-(-weight.rows // tile.bn), blocks),
        x,
        weight.codes,
        weight.scales,
        weight.supers,
        None if up is None else up.codes,
        None if up is None else up.scales,
        None if up is None else up.supers,
        block_expert,
        block_routes,
        count,
        out,
        weight.rows,
        weight.cols,
        weight.format,
        None if up is None else up.format,
        top_k,
        tile.bm,
        tile.bn,
        tile.bk,
        PDL,
        num_warps=tile.warps,
        num_stages=_stages(weight, tile) if up is None else min(_stages(weight, tile), _stages(up, tile)),
        launch_pdl=PDL,
    )
