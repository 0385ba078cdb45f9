"""Launches attention to chosen blocks of keys."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.attention.chosen import chosen_blocks_kernel
from moeserve.kernels.attention.op import score_scale
from moeserve.kernels.attention.workspace import DecodeWorkspace
from moeserve.kernels.launch import next_power_of_2, pdl
from moeserve.kernels.stream_operands import KvLayer

# Keys that a program processes at once, and its smallest split, in multiples of them.
KEYS, LEAST = 64, 2


def attend_blocks(
    q: Tensor,
    kv: KvLayer,
    table: Tensor,
    req_slots: Tensor,
    chosen: Tensor,
    lasts: Tensor,
    count: Tensor,
    block: int,
    workspace: DecodeWorkspace | None,
    out: GpuActivations,
    *,
    scale: float | None = None,
) -> None:
    """Launches attention to chosen blocks: row i < count[0] attends to the first lasts[i] + 1 keys of the blocks
    chosen[i], which have `block` keys each. Writes `out`.

    q [n, heads, dim], rotated and scaled, of the dtype that keys are read as; table int32 [requests, length]; req_slots
    int32 [n]; chosen int32 [n, 1 or KV heads, any], lasts int32 [n]: from `indexer.op.choose`. workspace: for at least
    n rows; None: a row's keys are not split, which suits many rows. out [n, heads * v_dim]. scale: as for
    `decode_attention`.
    """
    (n, heads, dim), (_, choices, width), w = q.shape, chosen.shape, workspace
    kv_heads, v_dim = kv.keys.shape[1], kv.values.shape[2]
    chosen_blocks_kernel(
        (n, kv_heads, 1 if w is None else w.splits), q, kv.keys, kv.values, kv.key_scales, kv.value_scales, table,
        req_slots, chosen, lasts, count, *((None, None, None) if w is None else (w.sums, w.stats, w.counters)), out.x,
        out.codes, out.scales, table.stride(0), heads, kv_heads, dim, v_dim, choices, width, block,
        score_scale(scale, dim), max(16, next_power_of_2(heads // kv_heads)), max(16, next_power_of_2(dim)),
        max(16, next_power_of_2(v_dim)), KEYS, 1 if w is None else w.splits, LEAST, pdl(), num_warps=4, num_stages=2,
        launch_pdl=pdl(),
    )  # fmt: skip
