"""Launches decode attention in equal shares on Hopper (shared_decode.py)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moeserve.kernels.attention.new_tokens import NewTokens, kernel_arguments
from moeserve.kernels.launch import multiprocessors, next_power_of_2, pdl, warpgroups

# Each program looks at all rows' lengths. Two sizes of this look, so that few kernels are compiled.
FEW_ROWS, MAX_ROWS = 256, 1024
MAX_GROUP = 16  # query heads per KV head


@dataclass(frozen=True, slots=True)
class SharedTile:
    keys: int  # keys processed at once
    stages: int
    programs: int  # per multiprocessor
    registers: int  # per thread, on average of both warpgroups
    copying: int  # registers per thread of the copying warpgroup
    together: int  # partial results combined at once
    # Blocks that a single row may have without being divided: combining its parts would take longer than the blocks.
    whole: int = 0


# By the width of a head, key and value alike: for one row, and for many. Few programs combine a long row sooner.
TILES = {
    64: (SharedTile(128, 3, 2, 128, 64, 8), SharedTile(64, 3, 4, 64, 32, 4)),
    128: (SharedTile(128, 3, 1, 232, 64, 8, 2), SharedTile(64, 3, 2, 128, 64, 4)),
    256: (SharedTile(64, 3, 1, 232, 64, 4), SharedTile(64, 3, 1, 232, 64, 4)),
}


def heads_at_once(group: int) -> int:
    """Returns the columns that the tensor cores take for a group of query heads."""
    return max(8, next_power_of_2(group))


def partial_results(group: int, dim: int) -> tuple[int, int, int, int]:
    """Returns the shape of part_sums, for the tile with the most programs; empty where attention has no shares."""
    programs = (
        0 if dim not in TILES or group > MAX_GROUP else max(_programs(dim, 1), _programs(dim, MAX_ROWS))
    )
    return programs, 2, heads_at_once(group), dim


def takes_shares(
    group: int, keys: Tensor, values: Tensor, new: NewTokens | None, rows: int, *, sees_ahead: bool
) -> bool:
    """Returns whether `attend_in_shares` can compute the attention of `rows` decode rows on this GPU. It needs Hopper,
    and keys and values [slots, kv_heads, dim] of 16 bits and one shape. group: query heads per KV head; new: the rows'
    own tokens, if they are not in the pool yet; sees_ahead: rows may see later positions (`ends`)."""
    if not warpgroups() or sees_ahead or rows > MAX_ROWS or group > MAX_GROUP:
        return False
    if keys.dtype.itemsize != 2 or keys.shape != values.shape or keys.shape[2] not in TILES:
        return False
    if new is None:
        return True
    is_plain = not new.norm_after and new.v_eps is None and new.v_scale == 1.0
    return is_plain and (new.q_norm is None) == (new.k_norm is None)


def attend_in_shares(
    q: Tensor,
    new: NewTokens | None,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None,
    table: Tensor,
    req_slots: Tensor,
    positions: Tensor,
    count: Tensor,
    part_sums: Tensor,
    part_stats: Tensor,
    counters: Tensor,
    out: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    window: int,
    scale: float,
) -> None:
    """Launches `shared_decode`, which divides all rows' keys into equal shares, one for each program. part_sums and
    part_stats: float32 scratch that `partial_results` makes; counters: int32, 0 before and after. scale: factor of the
    scores that includes log2(e), because the kernel takes powers of two. Other arguments as for `decode_attention`
    (op.py)."""
    from moeserve.kernels.attention.shared_decode import shared_decode  # Gluon takes 70 ms to import

    (n, width), (_, kv_heads, dim) = q.shape, keys.shape
    tile, own = _tile(dim, n), kernel_arguments(new, dim)
    shared_decode(
        (_programs(dim, n),),
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
        sinks,
        table,
        req_slots,
        positions,
        own.slots,
        count,
        part_sums,
        part_stats,
        counters,
        out,
        codes,
        scales,
        q.stride(0),
        own.k_stride,
        own.v_stride,
        table.stride(0),
        width // dim,
        kv_heads,
        dim,
        own.rotary,
        own.q_eps,
        window,
        scale,
        own.height,
        own.width,
        own.time,
        FEW_ROWS if n <= FEW_ROWS else MAX_ROWS,
        heads_at_once(width // dim // kv_heads),
        tile.keys,
        tile.stages,
        tile.together,
        tile.copying,
        tile.whole,
        pdl(),
        num_warps=4,
        maxnreg=tile.registers,
        launch_pdl=pdl(),
    )


def _tile(dim: int, rows: int) -> SharedTile:
    one, many = TILES[dim]
    return one if rows == 1 else many


def _programs(dim: int, rows: int) -> int:
    return _tile(dim, rows).programs * multiprocessors()
