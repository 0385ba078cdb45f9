"""Pooled index keys on a GPU: `pools.py` has the arithmetic."""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel


@kernel
def pool_store_kernel(
    q, keys, gates, norm, bias, slots, count, queries, index_keys,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    EPS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes the index queries of rows i < count[0], and stores the LayerNorm of each row's key and its gate in the
    row's slot, for `complete_pools_kernel`. Grid (n, HEADS + 1): programs (i, 0 .. HEADS - 1) have the heads of row i,
    (i, HEADS) its key.

    q [n, HEADS * DIM], keys, gates [n, DIM], rows at their strides; norm, bias float32 [DIM]; queries [n, HEADS, DIM];
    index_keys [slots, 2 * DIM]: row slots[i] is written unless slots[i] is negative. SIZE: a power of two that holds
    DIM.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, part = tl.program_id(0), tl.program_id(1)
    if i >= tl.load(count):
        return
    row, d = i.to(tl.int64), tl.arange(0, SIZE)
    live = d < DIM
    if part < HEADS:
        x = tl.load(q + row * Q_STRIDE + part * DIM + d, live, 0.0)
        tl.store(queries + (row * HEADS + part) * DIM + d, x.to(queries.dtype.element_ty), live)
    else:
        slot = tl.load(slots + i).to(tl.int64)
        if slot >= 0:
            x = tl.load(keys + row * K_STRIDE + d, live, 0.0).to(tl.float32)
            centred = tl.where(live, x - tl.sum(x, 0) / DIM, 0.0)
            x = centred * tl.rsqrt(tl.sum(centred * centred, 0) / DIM + EPS)
            x = x * tl.load(norm + d, live, 0.0) + tl.load(bias + d, live, 0.0)
            gate = tl.load(gates + row * GATE_STRIDE + d, live, 0.0)
            kept = index_keys + slot * 2 * DIM + d
            tl.store(kept, x.to(index_keys.dtype.element_ty), live)
            tl.store(kept + DIM, gate.to(index_keys.dtype.element_ty), live)


@kernel
def complete_pools_kernel(
    table, req_slots, ape, positions, slots, count, index_keys,
    TABLE_STRIDE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows < count[0] whose token is the last of a block of BLOCK replace the key in their slot by the block's index
    key: the mean of the keys in the slots of the block's tokens, weighted by column with the softmax of their gates
    and ape [BLOCK, DIM]. The gates stay. Grid (n)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0)
    if i >= tl.load(count):
        return
    position, slot = tl.load(positions + i), tl.load(slots + i).to(tl.int64)
    if ((position + 1) % BLOCK != 0) | (slot < 0):
        return
    d = tl.arange(0, SIZE)
    live = d < DIM
    held = table + tl.load(req_slots + i).to(tl.int64) * TABLE_STRIDE + position + 1 - BLOCK
    largest = tl.full([SIZE], float("-inf"), tl.float32)
    weights, total = tl.zeros([SIZE], tl.float32), tl.zeros([SIZE], tl.float32)
    for at in range(BLOCK):
        kept = index_keys + tl.load(held + at).to(tl.int64) * 2 * DIM + d
        key = tl.load(kept, live, 0.0).to(tl.float32)
        gate = tl.load(kept + DIM, live, 0.0).to(tl.float32) + tl.load(ape + at * DIM + d, live, 0.0)
        new = tl.maximum(largest, gate)
        shrink, weight = tl.exp(largest - new), tl.exp(gate - new)
        weights = weights * shrink + weight
        total = total * shrink + weight * key
        largest = new
    tl.debug_barrier()  # all threads have read the token's own key
    tl.store(index_keys + slot * 2 * DIM + d, (total / weights).to(index_keys.dtype.element_ty), live)
