"""Launches compressed attention and the operations around it on a GPU: `reference.py` has the arithmetic.

A layer's keys have three parts (`KeyRings`): entries by KV slot, a ring of each state's last keys, and rows for the
keys of a step. If a sequence has more new tokens than its ring has spare rows, their keys stay in the step's rows
until all of its rows have attended; then `keep_keys` copies them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.compressed.attention import compressed_attention_kernel
from moeserve.kernels.compressed.triton import (
    advance_kernel,
    compressed_store_kernel,
    entries_kernel,
    keep_keys_kernel,
)
from moeserve.kernels.compressed_operations import CompressorParameters, RowAngles
from moeserve.kernels.delta_net.op import StepSequences
from moeserve.kernels.launch import HOPPER_SHARED_MEMORY, next_power_of_2, pdl, shared_memory
from moeserve.kernels.stream_operands import KvLayer

COLUMNS = 128  # of an entry in progress, that a program moves on
# Heads per program, keys at once and warps of attention, in steps of few rows and of many; and of many with less shared
# memory than Hopper's. Not measured.
FEW = (16, 32, 4)
MANY = (64, 32, 8)
MANY_SMALL = (32, 32, 4)
MANY_ROWS = 64


@dataclass(frozen=True, slots=True)
class WindowKeys:
    """The keys of a layer with compressed attention, and where the sequences' rings lie among them. A ring holds the
    keys of a sequence's last tokens; the key of position p is row p % ring of it."""

    keys: Tensor  # [rows, 1, dim], also the values
    rings: Tensor  # int64 [2], on the device: the first row of the rings, and the first one behind them
    ring: int  # rows of each
    window: int  # tokens that a row attends to, with itself

    @classmethod
    def of(cls, kv: KvLayer, window: int) -> WindowKeys:
        assert kv.rings is not None
        rings = torch.tensor([kv.rings.first, kv.rings.end], dtype=torch.int64, device=kv.keys.device)
        return cls(kv.keys, rings, kv.rings.rows, window)

    @property
    def most_fitting(self) -> int:
        """Maximum number of a sequence's tokens per step whose keys are written directly to its ring."""
        return self.ring - self.window + 1


def compressed_store(
    q: Tensor,
    kv: Tensor,
    norm: Tensor,
    eps: float,
    scale: float,
    angles: RowAngles,
    sequences: StepSequences,
    keys: WindowKeys,
    count: Tensor,
    queries: Tensor,
    index_q: Tensor | None = None,
    index_queries: Tensor | None = None,
) -> None:
    """Writes the queries and stores the tokens' keys, for rows i < count[0]: `reference.queries`, `reference.keys`;
    rotates the index queries.

    q [n, heads * dim], kv [n, dim], rows at any stride; norm float32 [dim]; angles on the device; queries [n, heads,
    dim] of the keys' dtype. index_q [n, index heads * any], rows at any stride; index_queries float16 [n, index heads,
    any]. Raises ValueError for heads whose rotated end does not begin with a pair. eps: added to the mean square under
    the norm's root."""
    n, heads, dim = queries.shape
    rotary = _rotary(angles, dim)
    index_heads, index_dim = (0, 2) if index_queries is None else index_queries.shape[1:]
    s = sequences
    compressed_store_kernel(
        (n, heads + 1 + index_heads), q, kv, norm, *angles, index_q, s.row_sequence, s.first, s.count, s.slot,
        keys.rings, count, queries, keys.keys, index_queries, q.stride(0), kv.stride(0),
        0 if index_q is None else index_q.stride(0), heads, dim, rotary, eps, scale, index_heads, index_dim,
        keys.window, keys.ring, next_power_of_2(dim), next_power_of_2(index_dim), pdl(), num_warps=4, launch_pdl=pdl(),
    )  # fmt: skip


def compress(
    kv: Tensor,
    gate: Tensor,
    w: CompressorParameters,
    eps: float,
    angles: RowAngles,
    sequences: StepSequences,
    states: Tensor,
    kv_slots: Tensor,
    count: Tensor,
    entries: Tensor,
) -> None:
    """Stores the entries of the blocks that the step's tokens complete, each in the last token's row of `entries`, then
    moves the sequences' states on: `reference.compress`, however a sequence is divided into steps.

    kv, gate floats [n, width], rows at any stride; states float32 [slots, any], of which the first columns are this
    compressor's; kv_slots int32 [n] (negative: not stored); entries [rows, 1, dim]. eps: added to the mean square
    under the norm's root."""
    n, dim, (ratio, width), s = len(kv), len(w.norm), w.bias.shape, sequences
    sizes = (kv.stride(0), gate.stride(0), states.stride(0), dim, ratio, width > dim)
    entries_kernel(
        (n,), kv, gate, w.bias, w.norm, *angles, s.row_sequence, s.first, s.slot, kv_slots, states, count, entries,
        *sizes, _rotary(angles, dim), eps, next_power_of_2(dim), pdl(), num_warps=4, launch_pdl=pdl(),
    )  # fmt: skip
    columns = min(COLUMNS, next_power_of_2(dim))
    advance_kernel(
        (len(s.first), -(-dim // columns)), kv, gate, w.bias, angles.positions, s.first, s.count, s.slot, states,
        *sizes, columns, pdl(), num_warps=columns // 32, launch_pdl=pdl(),
    )  # fmt: skip


def compressed_attention(
    q: Tensor,
    keys: WindowKeys,
    sinks: Tensor,
    angles: RowAngles,
    sequences: StepSequences,
    table: Tensor,
    req_slots: Tensor,
    ratio: int,
    chosen: Tensor | None,
    top: int,
    count: Tensor,
    out: Tensor,
) -> None:
    """Launches compressed attention: row i < count[0] attends to the entries and to the tokens of its window, and its
    output is rotated back: `reference.attend`, `reference.rotate_back`.

    q [n, heads, dim], from `compressed_store`; sinks float32 [heads]; table int32 [requests, length]; req_slots int32
    [n]; ratio: tokens of an entry's block, 0: there are no entries; chosen int32 [n, 1, any], top: from
    `indexer.op.choose`, None and 0: rows attend to all entries; out floats [n, heads * dim].
    """
    (n, heads, dim), s = q.shape, sequences
    many = MANY if shared_memory() >= HOPPER_SHARED_MEMORY else MANY_SMALL
    together, at_once, warps = many if n >= MANY_ROWS else FEW
    together = max(16, min(together, next_power_of_2(heads)))
    compressed_attention_kernel(
        (n, -(-heads // together)), q, keys.keys, sinks, angles.cos, angles.sin, table, req_slots, angles.positions,
        chosen, s.row_sequence, s.first, s.count, s.slot, keys.rings, count, out, table.stride(0), heads, dim,
        _rotary(angles, dim), ratio, top, 0 if chosen is None else chosen.stride(0), keys.window, keys.ring, together,
        max(16, next_power_of_2(dim)), at_once, pdl(), num_warps=warps, num_stages=2, launch_pdl=pdl(),
    )  # fmt: skip


def keep_keys(keys: WindowKeys, positions: Tensor, sequences: StepSequences) -> None:
    """Copies the step's keys to the rings of their sequences, for sequences whose rings had no room for all of the
    step's keys. Call it after attention, which still reads what the copies overwrite. positions: int32 [n], the rows'
    positions."""
    if keys.window == 1:
        return
    dim, s = keys.keys.shape[2], sequences
    keep_keys_kernel(
        (len(s.first), keys.window - 1), positions, s.first, s.count, s.slot, keys.rings, keys.keys, dim, keys.window,
        keys.ring, next_power_of_2(dim), pdl(), num_warps=4, launch_pdl=pdl(),
    )  # fmt: skip


def _rotary(angles: RowAngles, dim: int) -> int:
    rotary = 2 * angles.cos.shape[1]
    if rotary > dim or (dim - rotary) % 2:
        raise ValueError(
            f"a head of {dim} numbers, the last {rotary} rotated in pairs: both must be even, {dim} at least {rotary}"
        )
    return rotary
