"""Launches products with matrices in planes: with int8 activations for few tokens, in 16 bits for many."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeserve.kernels.launch import next_power_of_2, pdl
from moeserve.kernels.linear.few_rows_op import run_few_rows, takes_few_rows
from moeserve.kernels.linear.gemm import gated_gemm_kernel, gemm_kernel
from moeserve.kernels.linear.gemv import gemv_kernel
from moeserve.kernels.linear.large_batch import narrow_float_linear
from moeserve.kernels.linear.narrow_gemm import narrow_gemm_kernel
from moeserve.kernels.linear.operands import SILU, Gated, RouteBlocks, Weight, weight_of
from moeserve.kernels.linear.sliced_k_gemm import gated_sliced_k_gemm_kernel, sliced_k_gemm_kernel
from moeserve.kernels.linear.wide_matrices import WIDE_GEMV_TOKENS, is_wide
from moeserve.kernels.planes.layout import K_BLOCK, k_blocks_of
from moeserve.quantization import BlockLayout

INT8_TOKENS = 8  # with more tokens, a dense product is faster with activations in 16 bits
# A head's product has more rows, and then these are faster from fewer tokens on.
MANY_ROWS, MANY_ROWS_INT8_TOKENS = 32_768, 4
WIDE_TOKENS = 4096  # more of them take a router's product as those of unpacked weights
NARROW_ROWS, NARROW_TOKENS = 256, 512  # up to here a router's few rows do not fill larger tiles


def int8_tokens(rows: int) -> int:
    """Returns the most tokens for which a product with `rows` rows of a quantised matrix may take int8 activations;
    with more tokens it takes float activations in 16 bits."""
    return INT8_TOKENS if rows <= MANY_ROWS else MANY_ROWS_INT8_TOKENS


def slices_k(*weights: Weight) -> bool:
    """Returns whether sliced_k_gemm.py multiplies the matrices: it has no codebooks, and no scales per more than 32
    columns or with zero points."""
    return all(isinstance(w.format, BlockLayout) and w.format.slices_k for w in weights)


def takes_int8(tokens: int, x: Tensor | None, *weights: Weight) -> bool:
    """Returns whether `linear` takes int8 activations of `tokens` padded rows (float matrices: floats, by GEMV), rather
    than activations in 16 bits on the tensor cores: not for wide matrices for which these are faster, if there are
    float activations `x`."""
    if tokens > int8_tokens(weights[0].rows):
        return False
    by_tensor_cores = is_wide(weights[0].rows, weights[0].cols) and slices_k(*weights) and x is not None
    return tokens <= WIDE_GEMV_TOKENS or not by_tensor_cores


@dataclass(frozen=True, slots=True)
class GemvTile:
    """The tile sizes of a GEMV; `linear/k_blocks.py` explains the letters."""

    br: int
    nb: int
    bk: int
    warps: int
    tokens: int = 1  # processed together


def gemv_tile(weight: Weight, *, blocks: int = 1, tokens: int = 1, warps: int = 4, nb: int = 4) -> GemvTile:
    """Returns a tile in which each thread computes one K block of nb rows. For a float matrix (the router): few rows
    (1 to 8) a program, for at least 128 programs where the matrix has that many rows; four warps each. blocks: blocks
    of `tokens` tokens; a program takes its rows for one of them."""
    if weight.format is None:
        br = max(1, min(8, next_power_of_2(weight.rows) * blocks // 256))
        return GemvTile(br, 1, float_columns(weight, br), 4, tokens)
    k_blocks = min(next_power_of_2(k_blocks_of(weight.cols)), 32)
    br = 32 * warps // k_blocks
    while nb > 1 and br * nb > weight.rows:
        nb //= 2
    return GemvTile(br, nb, k_blocks * K_BLOCK, warps, tokens)


def float_columns(weight: Weight, rows: int) -> int:
    """Returns the columns of `rows` rows of a float matrix that a program loads at once: at most 8 KB."""
    fitting = max(K_BLOCK, 8192 // (rows * weight.codes.element_size()))
    return min(max(K_BLOCK, next_power_of_2(weight.cols)), fitting)


@dataclass(frozen=True, slots=True)
class GemmTile:
    bm: int  # tokens
    bn: int  # rows of the matrix, or of each of two matrices
    k_blocks: int  # K blocks per iteration
    warps: int
    stages: int
    sliced_k: bool = False  # sliced_k_gemm.py's products for quantised matrices
    registers: int | None = None  # registers per thread, at most


_ANY = 1 << 31
# (most tokens, most rows of the first matrix, tile): the first line that fits applies. Measured (gpu_kernels.py
# tune and gpu/dense_forms.py of benchmarks/). Tiles have few tokens, so that there are enough programs; their
# blocks unpack the same weights again, from the L2 cache. With few rows, which several GPUs divide further, a
# program's columns are divided among more warps (docs/results/gpu-kernels.md). A head has enough programs. Three
# stages for q, k and v from 33 tokens on: a layer of 64 takes 240 us instead of 244.
DENSE_TILES: tuple[tuple[int, int, GemmTile], ...] = (
    (8, 4096, GemmTile(8, 32, 4, 4, 2, sliced_k=True)),
    (8, 8192, GemmTile(8, 32, 8, 8, 2, sliced_k=True)),  # 54 us for 5,120 x 17,408 in Q6_K, by 8 x 64 62
    (8, _ANY, GemmTile(8, 64, 4, 4, 2, sliced_k=True)),
    (16, 4096, GemmTile(16, 32, 4, 4, 2, sliced_k=True)),
    (32, 4096, GemmTile(16, 32, 4, 8, 2, sliced_k=True)),
    (32, MANY_ROWS, GemmTile(16, 64, 4, 4, 2, sliced_k=True)),
    (16, _ANY, GemmTile(16, 64, 4, 4, 2, sliced_k=True)),
    (32, _ANY, GemmTile(32, 64, 2, 4, 3, sliced_k=True)),
    (64, 2048, GemmTile(16, 32, 4, 8, 2, sliced_k=True)),
    (64, 4096, GemmTile(16, 64, 4, 4, 2, sliced_k=True)),
    (64, MANY_ROWS, GemmTile(16, 64, 4, 4, 3, sliced_k=True)),
    (_ANY, MANY_ROWS, GemmTile(64, 128, 2, 4, 2)),
    (_ANY, _ANY, GemmTile(64, 128, 2, 4, 2, sliced_k=True)),
)


def dense_tile(tokens: int, rows: int) -> GemmTile:
    return next(
        tile for most_tokens, most_rows, tile in DENSE_TILES if tokens <= most_tokens and rows <= most_rows
    )


@dataclass(frozen=True, slots=True)
class PairsTile:
    """A tile of `narrow_gemm.py`."""

    tokens: int
    rows: int  # rows of the matrix
    columns: int  # columns per iteration
    warps: int


def pairs_tile(tokens: int) -> PairsTile:
    """Returns the tile with which narrow_gemm.py multiplies a float matrix of few rows, such as a router's, for a
    number of tokens. Measured with a router of 128 rows: a layer takes 20 us less than by GEMV with 256 tokens, and 4
    us less with 64 and with 128. With up to 64 tokens and 2,048 columns, an iteration over more than 256 columns saves
    2 to 3 us."""
    if tokens > 64:
        return PairsTile(8, 8, 128, 4) if tokens > 128 else PairsTile(4, 8, 256, 4)
    return PairsTile(8, 8, 512, 16) if tokens > 32 else PairsTile(4, 8, 512, 8)


def narrow_tile(tokens: int) -> GemmTile:
    """Returns the tile for a float matrix with few rows, such as a router's: larger ones leave most of a GPU without a
    program (docs/results/gpu-kernels.md)."""
    return GemmTile(32, 64, 2, 4, 2) if tokens <= 4096 else GemmTile(32, 128, 2, 8, 2)


def linear(
    x: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    count: Tensor,
    planes: list[Tensor],
    kind: int,
    second: list[Tensor] | None,
    second_kind: int,
    cols: int,
    out: Tensor,
    *,
    bias: Tensor | None = None,
) -> None:
    """Computes out[i] = W x[i] + bias for rows i < count[0]; the second matrix gives the last columns (both quantised,
    or both floats). x, codes, scales: GpuActivations; float32 x is rounded to bfloat16 where the tensor cores multiply
    it; bias float32 [rows of both], out [n, rows of both]. planes, second: codes, scales and supers of the matrices [1,
    rows, cols] (`Planes`), second may be None; kind, second_kind: ggml's numbers of their types; cols: their
    columns."""
    weight = weight_of(planes, kind, cols)
    other = None if second is None else weight_of(second, second_kind, cols)
    n = len(out)
    both = (weight,) if other is None else (weight, other)
    if takes_int8(n, x, *both):
        if bias is None and codes is not None and scales is not None and takes_few_rows(n, *both):
            run_few_rows(codes.view(torch.int32), scales, weight, other, count, out)
            return
        tokens = min(4, next_power_of_2(n))
        if n == 4 and weight.rows <= 4096:
            tokens = 2  # for at least 64 programs (4 tokens: 55 us per layer instead of 58)
        blocks = -(-n // tokens)
        tile = gemv_tile(weight, blocks=blocks, tokens=tokens, warps=4 if weight.rows > MANY_ROWS else 2)
        run_gemv(x, codes, scales, weight, other, count, out, tile=tile, blocks=blocks, bias=bias)
        return
    assert x is not None
    is_narrow = weight.format is None and weight.rows <= NARROW_ROWS
    if is_narrow and n <= NARROW_TOKENS:
        run_narrow_gemm(x, weight, other, count, out, tile=pairs_tile(n), bias=bias)
    elif is_narrow and n > WIDE_TOKENS and other is None and x.dtype == weight.codes.dtype == torch.float32:
        narrow_float_linear(x, weight, count, out, bias=bias)
    else:
        gemm_tile = narrow_tile(n) if is_narrow else dense_tile(n, weight.rows)
        run_gemm(x, weight, other, None, count, out, tile=gemm_tile, bias=bias)


def floats_and_integers(
    weight: Weight, other: Weight | None, x: Tensor | None, codes: Tensor | None, scales: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the activations in the forms that the weights read, as (floats, int32 view of the integer codes, their
    scales); None for a form that neither reads. Raises ValueError if a form is missing."""
    both = (weight,) if other is None else (weight, other)
    floats, integers = any(w.format is None for w in both), any(w.format is not None for w in both)
    if (floats and x is None) or (integers and codes is None):
        raise ValueError("the activations lack the form that the weight takes")
    as_words = None if codes is None or not integers else codes.view(torch.int32)
    return x if floats else None, as_words, scales if integers else None


def run_gemv(
    x: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    weight: Weight,
    second: Weight | None,
    count: Tensor,
    out: Tensor,
    *,
    tile: GemvTile,
    blocks: int,
    bias: Tensor | None = None,
) -> None:
    """Launches gemv.gemv_kernel: products of `blocks` blocks of tile.tokens rows with a matrix, or with two that have
    the same columns. x, codes, scales: as for `linear`; out [n, rows of both], bias float32 [rows of both]. count:
    int32 [1], rows that exist; the others are not computed."""
    floats, words, word_scales = floats_and_integers(weight, second, x, codes, scales)
    bn = tile.br * tile.nb
    gemv_kernel(
        (-(-weight.rows // bn) + (0 if second is None else -(-second.rows // bn)), blocks),
        floats,
        words,
        word_scales,
        weight.codes,
        weight.scales,
        weight.supers,
        bias,
        count,
        out,
        None if second is None else second.codes,
        None if second is None else second.scales,
        None if second is None else second.supers,
        weight.rows,
        weight.cols,
        weight.format,
        0 if second is None else second.rows,
        None if second is None else second.format,
        tile.tokens,
        tile.br,
        tile.nb,
        tile.bk,
        pdl(),
        num_warps=tile.warps,
        launch_pdl=pdl(),
        prefers_l1=True,
    )


def run_narrow_gemm(
    x: Tensor,
    weight: Weight,
    second: Weight | None,
    count: Tensor,
    out: Tensor,
    *,
    tile: PairsTile,
    bias: Tensor | None = None,
) -> None:
    """Launches narrow_gemm.narrow_gemm_kernel: float matrices, x and bias of any float dtype."""
    bn = tile.rows
    rows = -(-weight.rows // bn) + (0 if second is None else -(-second.rows // bn))
    narrow_gemm_kernel(
        (rows, -(-len(out) // tile.tokens)), x, weight.codes, None if second is None else second.codes, bias, count,
        out, weight.rows, 0 if second is None else second.rows, weight.cols, tile.tokens, bn, tile.columns, pdl(),
        num_warps=tile.warps, launch_pdl=pdl(),
    )  # fmt: skip


def _fitting(tile: GemmTile, *weights: Weight) -> GemmTile:
    """Returns a tile that fits float matrices, which have no K blocks and take two or more bytes per column of
    shared memory: fewer stages. Other matrices that cannot slice K are supported only by gemm.py."""
    if slices_k(*weights):
        return tile
    return replace(tile, stages=2, sliced_k=False)


def run_gemm(
    x: Tensor,
    weight: Weight,
    second: Weight | None,
    routing: RouteBlocks | None,
    count: Tensor,
    out: Tensor,
    *,
    tile: GemmTile,
    bias: Tensor | None = None,
    top_k: int = 1,
    parts: int = 1,
) -> None:
    """Launches gemm_kernel or sliced_k_gemm_kernel with tile.bm routes (dense: tokens) per block. routing: the routes
    by block; None: one matrix for all tokens, of which the first count[0] are computed. x [tokens, cols]; bias float32
    [experts, rows of both]; out has `parts` rows per token, the first top_k for its routes."""
    t = _fitting(tile, *(weight,) if second is None else (weight, second))
    run = sliced_k_gemm_kernel if t.sliced_k else gemm_kernel
    more = (max(1, t.warps // t.k_blocks), t.stages) if t.sliced_k else ()
    run(
        (
            -(-weight.rows // t.bn) + (0 if second is None else -(-second.rows // t.bn)),
            -(-len(out) // t.bm) if routing is None else len(routing.expert),
        ),
        x,
        weight.codes,
        weight.scales,
        weight.supers,
        bias,
        None if routing is None else routing.expert,
        None if routing is None else routing.routes,
        count,
        out,
        None if second is None else second.codes,
        None if second is None else second.scales,
        None if second is None else second.supers,
        weight.rows,
        weight.cols,
        weight.format,
        0 if second is None else second.rows,
        None if second is None else second.format,
        top_k,
        parts,
        t.bm,
        t.bn,
        t.k_blocks,
        *more,
        pdl(),
        num_warps=t.warps,
        num_stages=t.stages,
        maxnreg=t.registers,
        launch_pdl=pdl(),
    )


def run_gated_gemm(
    x: Tensor,
    gate: Weight,
    up: Weight,
    routing: RouteBlocks,
    top_k: int,
    out: Tensor,
    *,
    tile: GemmTile,
    options: Gated = SILU,
) -> None:
    """Launches gated_gemm_kernel or gated_sliced_k_gemm_kernel: for each route, the activation of its expert's gate and
    up products. tile.bm: routes per block; x: [tokens, hidden]; out: [routes, ff]."""
    t = _fitting(tile, gate, up)
    run = gated_sliced_k_gemm_kernel if t.sliced_k else gated_gemm_kernel
    more = (max(1, t.warps // t.k_blocks), t.stages) if t.sliced_k else ()
    run(
        (-(-gate.rows // t.bn), len(routing.expert)), x,
        gate.codes, gate.scales, gate.supers, up.codes, up.scales, up.supers, options.gate_bias, options.up_bias,
        routing.expert, routing.routes, out, gate.rows, gate.cols, gate.format, up.format, options.form,
        options.by_route, top_k, t.bm, t.bn, t.k_blocks, *more, pdl(),
        num_warps=t.warps, num_stages=t.stages, maxnreg=t.registers, launch_pdl=pdl(),
    )  # fmt: skip
