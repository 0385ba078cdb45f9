"""Launches the routed experts for few tokens: gate and up with SiLU, then down with the sum over a token's experts."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.experts.gemv import down_kernel, up_kernel
from moeserve.kernels.launch import next_power_of_2, pdl, row_stride
from moeserve.kernels.linear.op import GemvTile, float_columns, floats_and_integers
from moeserve.kernels.linear.operands import SILU, Gated, Weight, weight_of
from moeserve.kernels.planes.layout import K_BLOCK, QUANT_GROUP, k_blocks_of

SOME = 4  # tokens; larger batches have other tiles


def k_blocks_at_once(k_blocks: int, tokens: int) -> int:
    """Returns how many K blocks of a row the threads of a gate and up program process together: a power of two.

    Up to SOME tokens: 32, because their loads then overlap; more tokens: 8. From 2 to SOME tokens also 8, if that
    avoids a quarter or more of idle threads: 2,880 columns have 23 K blocks, so with 32 nine threads idle, with
    three rounds of 8 only one does. A step of 2 or 4 rows is then 1.08 times as fast; a single row would be slower
    (docs/results/gpu-kernels.md).
    """
    most, fewer = min(next_power_of_2(k_blocks), 32), min(next_power_of_2(k_blocks), 8)
    spares = tokens > 1 and 4 * _padded(k_blocks, fewer) <= 3 * _padded(k_blocks, most)
    return fewer if tokens > SOME or spares else most


def _padded(k_blocks: int, at_once: int) -> int:
    return -(-k_blocks // at_once) * at_once


def up_tile(gate: Weight, up: Weight, tokens: int) -> GemvTile:
    """Returns the tile of gate and up. A program's rows are a multiple of 32, because its output may be quantised. A
    thread has one K block of two rows of both matrices, or of more rows if there are few columns. Above SOME tokens a
    thread processes two K blocks in turn: smaller programs hide one another's waits (8 tokens: 2 us per layer, 16: 4).
    A thread does the same with three rounds of 8 K blocks."""
    if gate.format is None or up.format is None:
        weight = gate if gate.format is None else up
        return GemvTile(32, 1, float_columns(weight, 32), 4)
    in_row = k_blocks_of(gate.cols)
    k_blocks = k_blocks_at_once(in_row, tokens)
    warps = 8 if tokens <= SOME and k_blocks >= min(in_row, 32) else 4
    br = 32 * warps // k_blocks
    return GemvTile(br, max(2, QUANT_GROUP // br), k_blocks * K_BLOCK, warps)


def down_tile(weight: Weight, top_k: int, tokens: int) -> GemvTile:
    """Returns the tile of down. One token: all K blocks of its experts at once, so that their loads overlap; with
    48 of 64 used, a fourth of the threads idle, and that is still faster than three rounds of 16. Two rows a thread
    are 0.3 us faster than four with half the warps. More tokens give enough programs to hide one another's waits, if
    several fit on a multiprocessor: smaller ones, and above SOME tokens half the K blocks at a time (2 tokens: 1 us
    per layer, 4: 2, 8: 6, 16: 12; measured in whole layers, as the kernel alone, with its weights in the L2 cache,
    shows no difference)."""
    if weight.format is None:
        return GemvTile(8, 1, float_columns(weight, 8), 4)
    most, warps, nb = (64, 16, 2) if tokens == 1 else (64, 4, 8) if tokens <= SOME else (32, 4, 4)
    k_blocks = min(next_power_of_2(top_k * k_blocks_of(weight.cols)), most)
    return GemvTile(32 * warps // k_blocks, nb, k_blocks * K_BLOCK, warps)


def small_batch_up(
    x: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    gate: list[Tensor],
    gate_kind: int,
    up: list[Tensor],
    up_kind: int,
    cols: int,
    ids: Tensor,
    h: Tensor | None,
    h_codes: Tensor | None,
    h_scales: Tensor | None,
    *,
    options: Gated = SILU,
    tile: GemvTile | None = None,
    x_top_k: int | None = None,
) -> None:
    """Computes h[i * top_k + j] = gated(gate(x[i]), up(x[i])) with expert ids[i, j], int32 [n, top_k]; negative: none.

    x, codes, scales: GpuActivations [n, hidden]; a form that neither matrix reads may be None. ids may be columns of a
    wider tensor. The result is written to h [n * top_k, ff], or, if given, as int8 to h_codes and h_scales instead.
    x_top_k: routes that share a row of x; None: top_k. 1: x has a row for each route. gate_kind, up_kind: ggml's
    numbers of the matrices' types.
    """
    g, u = weight_of(gate, gate_kind, cols), weight_of(up, up_kind, cols)
    t = up_tile(g, u, len(ids)) if tile is None else tile
    floats, words, word_scales = floats_and_integers(g, u, x, codes, scales)
    up_kernel(
        (-(-g.rows // (t.br * t.nb)), ids.numel()),
        floats,
        words,
        word_scales,
        g.codes,
        g.scales,
        g.supers,
        u.codes,
        u.scales,
        u.supers,
        options.gate_bias,
        options.up_bias,
        ids,
        h if h_codes is None else None,
        h_codes,
        h_scales,
        g.rows,
        g.cols,
        g.format,
        u.format,
        options.form,
        options.by_route,
        ids.shape[1],
        ids.shape[1] if x_top_k is None else x_top_k,
        row_stride(ids),
        t.br,
        t.nb,
        t.bk,
        pdl(),
        num_warps=t.warps,
        launch_pdl=pdl(),
        prefers_l1=True,
    )


def small_batch_down(
    h: Tensor | None,
    h_codes: Tensor | None,
    h_scales: Tensor | None,
    down: list[Tensor],
    down_kind: int,
    cols: int,
    ids: Tensor,
    weights: Tensor,
    count: Tensor,
    out: Tensor,
    *,
    adds: bool = False,
    bias: Tensor | None = None,
    tile: GemvTile | None = None,
) -> None:
    """Computes out[i] = sum_j weights[i, j] * (down(h[i * top_k + j]) + bias) with expert ids[i, j], skipped if
    negative, for i < count[0]; adds: added to out[i]. h, or h_codes with h_scales: GpuActivations [n * top_k, ff]. ids
    int32, weights float32 [n, top_k], each may be columns of a wider tensor; bias float32 [experts, hidden]; out [n,
    hidden]. down_kind: ggml's number of the matrix's type."""
    w = weight_of(down, down_kind, cols)
    n, top_k = ids.shape
    t = down_tile(w, top_k, n) if tile is None else tile
    floats, words, word_scales = floats_and_integers(w, None, h, h_codes, h_scales)
    down_kernel(
        (-(-w.rows // (t.br * t.nb)), n),
        floats,
        words,
        word_scales,
        w.codes,
        w.scales,
        w.supers,
        bias,
        ids,
        weights,
        count,
        out,
        w.rows,
        w.cols,
        w.format,
        top_k,
        row_stride(ids),
        row_stride(weights),
        adds,
        t.br,
        t.nb,
        t.bk,
        pdl(),
        num_warps=t.warps,
        launch_pdl=pdl(),
        prefers_l1=True,
    )
