"""Launches attention over KV slots of single tokens, for decode rows and prefill chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moeserve.kernels.attention.decode import decode_kernel
from moeserve.kernels.attention.new_tokens import NewTokens, kernel_arguments
from moeserve.kernels.attention.prefill import prefill_kernel
from moeserve.kernels.attention.shares import attend_in_shares, takes_shares
from moeserve.kernels.attention.workspace import DecodeWorkspace
from moeserve.kernels.launch import HOPPER_SHARED_MEMORY, next_power_of_2, pdl, shared_memory, warpgroups

LOG2E = 1.4426950408889634
# The kernels read `ends` only with a window: this one holds every position.
WHOLE_WINDOW = 1 << 30


@dataclass(frozen=True, slots=True)
class DecodeTile:
    keys: int  # keys processed at once
    # smallest split, in multiples of `keys`: combining the results of smaller splits costs more time than they save
    least: int
    warps: int
    stages: int
    # A row whose splits would exceed this size, in multiples of `keys`, gets more splits than would fill a GPU.
    long: int = 16


DECODE = {  # by head width, padded to a power of two, from 128 on
    128: DecodeTile(64, 1, 4, 2),
    256: DecodeTile(64, 1, 4, 2),
    512: DecodeTile(32, 1, 4, 2),  # as many numbers of keys and values as for 256
}
# The same for 8-bit caches: two warps exchange less through shared memory, and four stages start loads earlier. A
# fifth stage leaves four resident programs 13 KB of a multiprocessor's shared memory: a layer of 8 rows at 32,000
# tokens then takes 228 us instead of 215.
DECODE_Q8 = {**DECODE, 128: DecodeTile(64, 1, 2, 4)}


@dataclass(frozen=True, slots=True)
class PrefillTile:
    rows: int  # query rows: tokens times heads per KV head
    keys: int  # keys processed at once
    warps: int
    stages: int


PREFILL = {  # by head width, a power of two
    128: PrefillTile(128, 128, 8, 2),  # a chunk of 8,192: 1.33 ms a layer, 1.73 with 64 keys and 3 stages
    256: PrefillTile(128, 64, 8, 2),  # the largest tiles that fit in shared memory, as below
    512: PrefillTile(32, 32, 4, 2),
    1024: PrefillTile(64, 32, 8, 2),  # latent attention's 576, whose values are its keys
}
# The same with less shared memory than Hopper's. Not measured.
PREFILL_SMALL = {256: PrefillTile(64, 64, 4, 2), 1024: PrefillTile(32, 16, 4, 1)}


@dataclass(frozen=True, slots=True)
class WarpgroupTile:
    """The tile with which warpgroups.py computes PREFILL; each of the two attending warpgroups takes half of its
    rows."""

    keys: int  # keys processed at once
    stages: int = 2
    attending: int = 224  # registers per thread of an attending warpgroup
    copying: int = 56


WARPGROUP_TILES = {
    64: WarpgroupTile(128),
    128: WarpgroupTile(128),
    256: WarpgroupTile(64),
}  # by the width of a head, key and value alike


def score_scale(scale: float | None, dim: int) -> float:
    """Returns the factor for scores of a q already multiplied by 1/sqrt(dim), for a softmax in powers of two."""
    return LOG2E if scale is None else LOG2E * scale * dim**0.5


def decode_attention(
    q: Tensor,
    new: NewTokens | None,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    req_slots: Tensor,
    positions: Tensor,
    count: Tensor,
    room: DecodeWorkspace,
    out: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    window: int = 0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    ends: Tensor | None = None,
    score_cap: float = 0.0,
) -> None:
    """Launches decode attention: row i < count[0] attends to the keys in slots table[req_slots[i], : positions[i] + 1],
    and the result is written to out, or as int8 to codes and scales. count[0] may be at most n: the kernel of shares.py
    takes the rows from the count, and has counters for those of `room`.

    q [n, heads * dim], rotated and scaled, in the dtype that keys are read as; keys [slots, kv_heads, dim], values
    [slots, kv_heads, v_dim], either without scales or int8 with float16 key_scales, value_scales [slots, kv_heads,
    dim / 32], [.., v_dim / 32] (quantize/kv.py); table int32 [requests, length]. room: for at least n rows. out and
    codes with scales: GpuActivations [n, heads * v_dim]. window and sinks (float32 [heads]) as in reference.py.

    new: q is as projected, rows at any stride, and each row's token is stored in the pool before the row attends to
    it. No row may attend to another's token of this call. The kernel then reads table, req_slots, positions, count
    and the pool before the previous kernel has ended (programmatic dependent launch). So neither that kernel, nor
    any earlier one up to the last that was launched without it, may write these.

    scale: factor of q k^T instead of 1/sqrt(dim). `rope_store` has already multiplied q by 1/sqrt(dim) in any case;
    this function applies only the remaining factor. ends: int32 [n]: row i sees the positions below ends[i], from the
    first one in the window of its own position on, or without a window from 0 on; None: as above. score_cap c above 0:
    scores become c tanh(score / c). Raises ValueError for a norm over all heads, which only `rope_store` computes, and
    for `ends` together with new tokens.
    """
    if ends is not None and new is not None:
        raise ValueError("ends cannot be combined with new tokens")
    window = _window_of(window, ends)
    n, (kv_heads, dim), v_dim = len(q), keys.shape[1:], values.shape[2]
    for norm in () if new is None else (new.q_norm, new.k_norm):
        if norm is not None and len(norm) != dim:
            raise ValueError(
                f"a norm of {len(norm)} columns, not of a head's {dim}: compute it with rope_store before"
            )
    heads = q.shape[1] // dim
    is_plain = not score_cap and takes_shares(
        heads // kv_heads, keys, values, new, n, sees_ahead=ends is not None
    )
    if is_plain:
        attend_in_shares(
            q, new, keys, values, sinks, table, req_slots, positions, count, room.share_sums, room.share_stats,
            room.counters, out, codes, scales, window, score_scale(scale, dim),
        )  # fmt: skip
        return
    own = kernel_arguments(new, dim)
    splits, group, v_size = room.sums.shape[2:]
    tile = (DECODE if key_scales is None else DECODE_Q8)[max(128, next_power_of_2(dim))]
    decode_kernel(
        (n, kv_heads, splits),
        q,
        own.k,
        own.v,
        own.q_norm,
        own.k_norm,
        own.cos,
        own.sin,
        own.sections,
        keys,
        values,
        key_scales,
        value_scales,
        sinks,
        table,
        req_slots,
        positions,
        ends,
        own.slots,
        count,
        room.sums,
        room.stats,
        room.counters,
        out,
        codes,
        scales,
        q.stride(0),
        own.k_stride,
        own.v_stride,
        table.stride(0),
        heads,
        kv_heads,
        dim,
        v_dim,
        own.rotary,
        own.q_eps,
        own.k_eps,
        own.v_eps,
        own.v_scale,
        window,
        score_scale(scale, dim),
        group,
        max(16, next_power_of_2(dim)),
        v_size,
        tile.keys,
        splits,
        tile.least,
        min(room.fill, splits),
        tile.long,
        own.norm_after,
        own.height,
        own.width,
        own.time,
        pdl(),
        LOG2E * score_cap,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=pdl(),
    )


def _window_of(window: int, ends: Tensor | None) -> int:
    return window if window or ends is None else WHOLE_WINDOW


def prefill_tiles(
    rows: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int32],
    req_slots: npt.NDArray[np.int32],
    heads: int,
    kv_heads: int,
    dim: int,
) -> npt.NDArray[np.int32]:
    """Divides prompt chunks into tiles for `prefill_attention`. Chunk i has rows rows[i] .. rows[i] + counts[i] - 1 of
    the step, at positions from positions[i] on, of request slot req_slots[i]: int32 [chunks] each. Returns int32
    [tiles, 4]: a tile's first row, its number of rows, the first row's position, and the request slot. heads, kv_heads,
    dim: numbers of query and KV heads, and the keys' width, on which a tile's size depends."""
    step = tile_tokens(heads, kv_heads, dim)
    tiles = -(-counts // step)
    chunk = np.repeat(np.arange(len(rows)), tiles)
    within = (np.arange(len(chunk)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * step
    columns = [
        rows[chunk] + within,
        np.minimum(step, counts[chunk] - within),
        positions[chunk] + within,
        req_slots[chunk],
    ]
    return np.stack(columns, axis=1).astype(np.int32)


def tile_tokens(heads: int, kv_heads: int, dim: int) -> int:
    return max(1, prefill_tile(dim).rows // next_power_of_2(heads // kv_heads))


def prefill_tile(dim: int) -> PrefillTile:
    """Returns the tile of prefill attention for heads of this width."""
    width = max(128, next_power_of_2(dim))
    is_small = shared_memory() < HOPPER_SHARED_MEMORY
    return PREFILL_SMALL.get(width, PREFILL[width]) if is_small else PREFILL[width]


def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    tiles: Tensor,
    out: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    window: int = 0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    ends: Tensor | None = None,
    score_cap: float = 0.0,
) -> None:
    """Launches causal attention of prompt chunks to all tokens up to each row, and writes `out`. tiles: int32 [tiles,
    4], from `prefill_tiles`, on the device.

    q [n, heads, dim], scaled; keys [slots, kv_heads, dim], values [slots, kv_heads, v_dim], including the chunks'
    own, of q's dtype or with scales; table int32 [requests, length]; out [n, heads * v_dim]. Other arguments as for
    `decode_attention`.
    """
    window = _window_of(window, ends)
    (_, heads, dim), (kv_heads, v_dim) = q.shape, values.shape[1:]
    by_warpgroups = dim == v_dim and dim in WARPGROUP_TILES and key_scales is None and ends is None
    if by_warpgroups and not score_cap and warpgroups():
        _attend_by_warpgroups(q, keys, values, table, tiles, out, window, sinks, score_scale(scale, dim))
        return
    tokens, tile = tile_tokens(heads, kv_heads, dim), prefill_tile(dim)
    prefill_kernel(
        (len(tiles), kv_heads),
        q,
        keys,
        values,
        key_scales,
        value_scales,
        sinks,
        table,
        tiles,
        ends,
        out,
        table.stride(0),
        heads,
        kv_heads,
        dim,
        v_dim,
        window,
        score_scale(scale, dim),
        max(16, next_power_of_2(dim)),
        max(16, next_power_of_2(v_dim)),
        tokens,
        tile.keys,
        max(16, next_power_of_2(tokens * (heads // kv_heads))),
        LOG2E * score_cap,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _attend_by_warpgroups(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    tiles: Tensor,
    out: Tensor,
    window: int,
    sinks: Tensor | None,
    scale: float,
) -> None:
    """Launches the kernel of warpgroups.py. scale: `score_scale`'s. Other arguments as for `prefill_attention`."""
    # Only here: Gluon takes 70 ms to import, and only Hopper needs it.
    from moeserve.kernels.attention.boxes import boxes_of
    from moeserve.kernels.attention.warpgroups import warpgroup_prefill

    (_, heads, dim), (_, kv_heads, v_dim) = q.shape, values.shape
    tile = WARPGROUP_TILES[dim]
    warpgroup_prefill(
        (len(tiles), kv_heads),
        q,
        keys,
        values,
        boxes_of(keys, tile.keys),
        boxes_of(values, tile.keys),
        sinks,
        table,
        tiles,
        out,
        table.stride(0),
        heads,
        kv_heads,
        dim,
        v_dim,
        window,
        scale,
        tile.keys,
        tile.stages,
        prefill_tile(dim).rows // 2,
        tile.attending,
        tile.copying,
        num_warps=4,
    )
