"""Launches latent attention and the operations around it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moeserve.kernels.attention.latent import combine_kernel, latent_attention_kernel
from moeserve.kernels.attention.op import prefill_tile, tile_tokens
from moeserve.kernels.attention.workspace import DecodeWorkspace, splits_that_fill
from moeserve.kernels.experts.op import method_for
from moeserve.kernels.latent.triton import latent_store_kernel, norm_kernel
from moeserve.kernels.launch import (
    HOPPER_SHARED_MEMORY,
    multiprocessors,
    next_power_of_2,
    pdl,
    shared_memory,
)
from moeserve.kernels.linear.op import run_gemm
from moeserve.kernels.linear.operands import RouteBlocks, weight_of


class DecodeTile(NamedTuple):
    """Heads of a row and keys that a program multiplies at once."""

    heads: int
    keys: int
    warps: int


# Tiles of decode rows: docs/results/gpu-kernels.md#latent-attention-of-decode-steps. A program of the wide tile fills a
# multiprocessor of a Hopper GPU: its heads and two blocks of 64 keys. Two programs of the next one fit, or four small.
WIDE_TILE, TILE, SMALL_TILE = DecodeTile(64, 64, 8), DecodeTile(16, 64, 4), DecodeTile(16, 32, 4)
MOST_NARROW = 32  # heads that do not use the wide tile
FEW_ROWS_OF_CHOSEN_KEYS = 2  # more of them use the wide tile
STAGES = 2  # blocks of keys in shared memory at once
KEY_BYTES = 2  # of a number of float16 or bfloat16
LEAST_KEYS = 64  # of a split of chosen keys
MOST_SPLITS = 128  # of a row, for the wide tile
COMBINING_WARPS = 4
COMBINED, COMBINED_COLUMNS = (
    8192,
    64,
)  # numbers of splits that a program combines at once, and the fewest of a split
# Smallest batch whose products use several tile sizes; smaller ones use the smallest tile.
FEWEST_TILED_ROWS = 17


def decode_workspace(
    rows: int,
    heads: int,
    rank: int,
    rotary: int,
    device: torch.device | str,
    splits: int | None = None,
    room: DecodeWorkspace | None = None,
) -> DecodeWorkspace:
    """Returns buffers for decode rows' partial results, for up to `rows` rows. rank, rotary: widths of a key's two
    parts. splits: per row, up to MOST_SPLITS; None: as many as fill a GPU. room: see DecodeWorkspace."""
    tile = decode_tile(heads, padded_width(rank, rotary))
    blocks = -(-heads // tile.heads)
    splits = splits or _splits_of_keys(tile, rows, blocks)
    return DecodeWorkspace(rows, blocks * tile.heads, blocks, rank, device, splits, room)


def padded_width(rank: int, rotary: int) -> int:
    """Returns the numbers of a key in shared memory, where its latent and its rotated part are padded."""
    return sum(max(16, next_power_of_2(part)) for part in (rank, rotary) if part)


def decode_tile(heads: int, width: int, rows: int | None = None) -> DecodeTile:
    """Returns the tile of decode rows with this number of heads. width: `padded_width` of the keys. rows: the number of
    rows, if they attend to chosen keys; None: they attend to all."""
    is_few = rows is not None and rows <= FEW_ROWS_OF_CHOSEN_KEYS
    if shared_memory() < HOPPER_SHARED_MEMORY or (is_few and heads > MOST_NARROW):
        return SMALL_TILE
    if heads > MOST_NARROW and _fits(WIDE_TILE, width):
        return WIDE_TILE
    return TILE if _fits(TILE, width) else SMALL_TILE


def _fits(tile: DecodeTile, width: int) -> bool:
    """Returns whether a program's heads and blocks of keys fit in shared memory. Compiled kernels need this much for
    the wide tile, and less for the others."""
    return (STAGES * tile.keys + tile.heads) * width * KEY_BYTES <= shared_memory()


def _splits_of_keys(tile: DecodeTile, rows: int, blocks: int) -> int:
    """Returns the number of splits per row of all its keys: of the wide tile, whose programs fill a multiprocessor
    each, the largest power of two with which no program waits for another."""
    if tile is not WIDE_TILE:
        return splits_that_fill(rows, blocks)
    return min(MOST_SPLITS, power_of_2_below(multiprocessors() // (rows * blocks)))


def power_of_2_below(n: int) -> int:
    """Returns the largest power of two that is at most n; 1 if n is 0."""
    return 1 << max(0, n.bit_length() - 1)


def by_head(rows: int, heads: int, device: torch.device | str) -> RouteBlocks:
    """Returns, for `linear_by_head`, the assignment of the rows of [rows * heads, cols] to the heads' matrices."""
    block = method_for(max(rows, FEWEST_TILED_ROWS)).block
    per_head = -(-rows // block)
    tokens = torch.arange(per_head * block).view(1, per_head, block)
    routes = tokens * heads + torch.arange(heads).view(heads, 1, 1)
    routes = routes.masked_fill(tokens >= rows, -1).view(heads * per_head, block)
    experts = torch.arange(heads).repeat_interleave(per_head)
    return RouteBlocks(experts.int().to(device), routes.int().contiguous().to(device))


def linear_by_head(
    x: Tensor, planes: list[Tensor], kind: int, cols: int, blocks: RouteBlocks, count: Tensor, out: Tensor
) -> None:
    """Computes out[t, h] = W_h x[t, h], with one matrix per head. x floats [n * heads, cols], out [n * heads, rows],
    contiguous; blocks: `by_head` of the n rows, all of which are computed. planes: codes, scales and supers of the
    matrices [heads, rows, cols] (`Planes`). kind: ggml's number of the weights' type."""
    tile = method_for(max(len(x) // planes[0].shape[0], FEWEST_TILED_ROWS)).down
    assert tile is not None
    run_gemm(x, weight_of(planes, kind, cols), None, blocks, count, out, tile=tile)


def norm_rows(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    count: Tensor,
    y: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    *,
    parts: int = 1,
) -> None:
    """Computes y = RMSNorm(x) * weight for each of a row's `parts` equal parts, or y = x without weight, for rows
    below count[0].

    x [n, cols], rows at any stride; weight float32 [cols / parts]. y, codes with scales: GpuActivations [n, cols].
    eps: added to the mean square under the norm's root."""
    dim = x.shape[1] // parts
    norm_kernel(
        (len(x), parts),
        x,
        weight,
        count,
        y,
        codes,
        scales,
        x.stride(0),
        parts,
        dim,
        None if weight is None else eps,
        next_power_of_2(dim),
        pdl(),
        num_warps=4,
        launch_pdl=pdl(),
    )


def latent_store(
    q: Tensor,
    latent: Tensor,
    norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    count: Tensor,
    scale: float,
    nope: Tensor,
    rotated: Tensor,
    keys: Tensor,
) -> None:
    """Writes the two parts of q, times `scale`, and stores the token's vector in the KV pool, for i < count[0].

    q [n, heads * (nope + rotary)], latent [n, rank + rotary], rows at any stride; norm float32 [rank]; cos, sin
    float32 [positions, rotary / 2]; positions, slots int32 [n] (negative slot: not stored); nope [n, heads, nope_dim],
    rotated [n, heads, rotary]; keys [slots, 1, rank + rotary]. eps: added to the mean square under the norm's root."""
    n, heads, nope_dim = nope.shape
    rotary, rank = rotated.shape[2], len(norm)
    latent_store_kernel(
        (n, heads + 1),
        q,
        latent,
        norm,
        cos,
        sin,
        positions,
        slots,
        count,
        nope,
        rotated,
        keys,
        q.stride(0),
        latent.stride(0),
        heads,
        nope_dim,
        rotary,
        rank,
        eps,
        scale,
        next_power_of_2(nope_dim),
        next_power_of_2(rotary // 2),
        next_power_of_2(rank),
        pdl(),
        num_warps=4,
        launch_pdl=pdl(),
    )


def decode_latent(
    q: Tensor,
    rotated: Tensor,
    keys: Tensor,
    table: Tensor,
    req_slots: Tensor,
    positions: Tensor,
    count: Tensor,
    workspace: DecodeWorkspace,
    out: Tensor,
    *,
    chosen: int | None = None,
) -> None:
    """Launches latent attention of decode rows: row i < count[0] attends to the keys in slots table[req_slots[i], :
    positions[i] + 1]. Writes `out`.

    q [n, heads, rank], rotated [n, heads, rotary], scaled, of the keys' dtype; keys [slots, 1, rank + rotary];
    table int32 [requests, length]; workspace: `decode_workspace` for at least n rows; out [n, heads, rank]. chosen: the
    most keys of a row, if each row attends to chosen ones only; None: rows may be long.
    """
    (n, heads, rank), rotary, w = q.shape, rotated.shape[2], workspace
    tile = decode_tile(heads, padded_width(rank, rotary), None if chosen is None else n)
    blocks, size = -(-heads // tile.heads), max(16, next_power_of_2(rank))
    splits = power_of_2_below(w.splits * w.sums.shape[1] // blocks)  # as the buffers have room for
    least = 1
    if chosen is not None:
        programs = multiprocessors() * (1 if tile is WIDE_TILE else 4)
        splits = min(splits, power_of_2_below(programs // (n * blocks)))
        splits = min(splits, next_power_of_2(-(-chosen // LEAST_KEYS)))
        least = max(1, LEAST_KEYS // tile.keys)
    latent_attention_kernel(
        (n, blocks, splits), q, rotated, keys, table, None, req_slots, positions, count, w.sums, w.stats, out,
        table.stride(0), heads, rank, rotary, tile.heads, tile.heads, size, max(16, next_power_of_2(rotary)), tile.keys,
        splits, least, pdl(), num_warps=tile.warps, num_stages=STAGES, launch_pdl=pdl(),
    )  # fmt: skip
    if splits > 1:
        columns = min(size, max(COMBINED_COLUMNS, COMBINED // splits))
        combine_kernel(
            (n, heads, size // columns), positions, count, w.sums, w.stats, out, heads, rank, tile.heads, size,
            tile.keys, splits, least, columns, pdl(), num_warps=COMBINING_WARPS, launch_pdl=pdl(),
        )  # fmt: skip


def prefill_latent(
    q: Tensor, rotated: Tensor, keys: Tensor, table: Tensor, tiles: Tensor, out: Tensor
) -> None:
    """Launches causal latent attention of prompt chunks to all tokens up to each row, and writes out [n, heads, rank].
    tiles: int32 [tiles, 4], on the GPU, from attention.op.prefill_tiles for the same number of heads, one KV head and a
    width of rank + rotary. Other arguments as for `decode_latent`."""
    _attend_whole(q, rotated, keys, table, tiles, None, None, None, out)


def attend_chosen(
    q: Tensor,
    rotated: Tensor,
    keys: Tensor,
    chosen: Tensor,
    row_numbers: Tensor,
    lasts: Tensor,
    count: Tensor,
    out: Tensor,
) -> None:
    """Launches latent attention to chosen keys: row i < count[0] attends to the slots chosen[i, : lasts[i] + 1]. As
    `decode_latent`, but the keys of a row are not split over programs, which suits many rows. chosen int32 [n, any],
    row_numbers int32 [n]: 0, 1, ...; other arguments as for `decode_latent`."""
    _attend_whole(q, rotated, keys, chosen, None, row_numbers, lasts, count, out)


def _attend_whole(
    q: Tensor,
    rotated: Tensor,
    keys: Tensor,
    table: Tensor,
    tiles: Tensor | None,
    req_slots: Tensor | None,
    positions: Tensor | None,
    count: Tensor | None,
    out: Tensor,
) -> None:
    """Launches attention without splits, of tiles of rows, or of each row without tiles."""
    n, heads, rank = q.shape
    rotary = rotated.shape[2]
    tile = prefill_tile(rank + rotary)
    programs, tokens = (n, 1) if tiles is None else (len(tiles), tile_tokens(heads, 1, rank + rotary))
    together = min(heads, tile.rows)
    latent_attention_kernel(
        (programs, -(-heads // together), 1), q, rotated, keys, table, tiles, req_slots, positions, count, None, None,
        out, table.stride(0), heads, rank, rotary, together, max(16, next_power_of_2(tokens * together)),
        max(16, next_power_of_2(rank)), max(16, next_power_of_2(rotary)), tile.keys, 1, 1, pdl(),
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl(),
    )  # fmt: skip
