"""Chooses which of a layer's missed experts the GPU fetches from RAM within the step; the CPU pool computes the others.

A fetched expert takes the slot of another one, and stays. One program decides for a layer, between the router and the
hand-off, so that the map, the routes and the pool's request agree: each route is computed once.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl
from torch import Tensor

from moeserve.kernels.handoff.triton import LEAST, MOST, ONE
from moeserve.kernels.launch import kernel, next_power_of_2, row_stride

MATRICES = 3  # of an expert
GEOMETRY = 9  # int64 numbers of a matrix, and
OF_PIECE = 3  # of each of its pieces
FIRST_SHARE = (LEAST.value + MOST.value) // 2  # in 1 / ONE
_MATRICES, _GEOMETRY, _OF_PIECE = tl.constexpr(MATRICES), tl.constexpr(GEOMETRY), tl.constexpr(OF_PIECE)
_NEVER = tl.constexpr(3.0e38)  # above every score
_AT_ONCE = tl.constexpr(64)  # experts that each expert is compared with at a time


@dataclass(frozen=True, slots=True)
class FetchLayer:
    """One layer's tensors on the device. E experts, C fetched at most in a step."""

    slots: Tensor  # int32 [E]: each expert's slot, -1: none. Written.
    places: Tensor  # int32 [E]: its place in RAM, -1: it must not be fetched or replaced
    scores: Tensor  # float32 [E]: recency with some frequency, as in the cache's policy. Written.
    # int64 [3, 9 + 3 N], by matrix, whose panels are on N NUMA nodes: address of the first expert's panels in the
    # staging buffer; first row in `addresses`, and rows from one expert to the next; addresses of codes, scales and
    # supers of slot 0, and their bytes per slot; for each node, address of its panels, and their bytes of an expert and
    # place among the expert's. Behind them, for each of B biases of an expert: addresses of expert 0's and of slot 0's,
    # and the bytes of one.
    geometry: Tensor
    copies: Tensor  # int64 [1 + (3 N + B) C, 3]: see `copy_scattered`. Written.
    addresses: Tensor  # int64 [3 C, 4]: see `unpack_scattered`. Written.
    fetched: Tensor  # int32 [2]: experts fetched in this step, and since start-up. Written.
    nodes: int = 1  # N
    biases: int = 0  # B


@kernel
def fetch_kernel(
    ids, local, slots, places, scores, geometry, copies, addresses, fetched, control, scratch,
    EACH: tl.constexpr, NODES: tl.constexpr, BIASES: tl.constexpr,
    ROWS: tl.constexpr, TOP_K: tl.constexpr, STRIDE: tl.constexpr,
    EXPERTS: tl.constexpr, ROOM: tl.constexpr, DECAY: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, E: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One program. ids, local int32 [ROWS, TOP_K], rows STRIDE apart: the routes' experts (-1: none) and their slots
    (-1: elsewhere), which are updated. FetchLayer declares slots to fetched. control int32 [2]: the share of the missed
    experts to fetch, in 1 / ONE, and the most in a layer. scratch int32 [3, EXPERTS].

    EACH: bytes of an expert in the staging buffer, which has ROOM of them. NODES: among which panels are divided.
    BIASES of an expert. R, K, E, C: powers of two of at least ROWS, TOP_K, EXPERTS and ROOM."""
    r, k, e = tl.arange(0, R)[:, None], tl.arange(0, K)[None, :], tl.arange(0, E)
    route, here = r * STRIDE + k, e < EXPERTS
    # What needs no other result is loaded first: the kernel's time is that of loads that wait for one another.
    share, most = tl.load(control), tl.load(control + 1)
    m = tl.arange(0, 4)[None, :]
    is_matrix = m < _MATRICES
    COPIES: tl.constexpr = _MATRICES * NODES + BIASES  # of an expert
    OF_MATRIX: tl.constexpr = _GEOMETRY + _OF_PIECE * NODES
    g = geometry + m * OF_MATRIX
    buffer, row, step = (tl.load(g, is_matrix, 0), tl.load(g + 1, is_matrix, 0), tl.load(g + 2, is_matrix, 0))
    expert = tl.load(ids + route, (r < ROWS) & (k < TOP_K), -1)
    used = tl.zeros([E], tl.int32)
    for at_row in tl.static_range(ROWS):
        own = tl.load(ids + at_row * STRIDE + tl.arange(0, K), tl.arange(0, K) < TOP_K, -1)
        used |= tl.max((own[None, :] == e[:, None]).to(tl.int32), axis=1)
    slot, place = tl.load(slots + e, here, 0), tl.load(places + e, here, -1)
    score = tl.load(scores + e, here, 0.0) * DECAY + used.to(tl.float32)
    used = tl.where(here, used, 0)
    missed, may_go = (used > 0) & (slot < 0) & (place >= 0), (used == 0) & (slot >= 0) & (place >= 0)
    # The missed experts by falling score, and by rising score those that may be replaced: among equals the first.
    coming, going = tl.where(missed, score, -1.0), tl.where(may_go, score, _NEVER)
    keys = scratch.to(tl.pointer_type(tl.float32))
    tl.store(keys + e, coming, here)
    tl.store(keys + EXPERTS + e, going, here)
    tl.debug_barrier()
    tl.store(scores + e, score, here)  # behind the barrier: threads that hold the same expert have loaded it
    rank_in, rank_out = tl.zeros([E], tl.int32), tl.zeros([E], tl.int32)
    for first in tl.static_range(0, EXPERTS, _AT_ONCE):
        j = first + tl.arange(0, _AT_ONCE)
        before = j[None, :] < e[:, None]
        other = tl.load(keys + j, j < EXPERTS, -2.0)[None, :]
        rank_in += tl.sum(
            ((other > coming[:, None]) | ((other == coming[:, None]) & before)).to(tl.int32), axis=1
        )
        other = tl.load(keys + EXPERTS + j, j < EXPERTS, _NEVER)[None, :]
        rank_out += tl.sum(
            ((other < going[:, None]) | ((other == going[:, None]) & before)).to(tl.int32), axis=1
        )
    num_missed, num_going = tl.sum(missed.to(tl.int32), 0), tl.sum(may_go.to(tl.int32), 0)
    # A copy takes longer than the pool's product: a single missed expert is left to the pool.
    wanted = tl.where(num_missed > 1, (num_missed * share + ONE // 2) // ONE, 0)
    count = tl.minimum(tl.minimum(wanted, num_going), tl.minimum(ROOM, most))
    comes, goes = missed & (rank_in < count), may_go & (rank_out < count)
    free = scratch + 2 * EXPERTS
    tl.store(free + rank_out, slot, goes)
    tl.debug_barrier()
    taken = tl.load(free + rank_in, comes, -1)
    tl.store(slots + e, taken, comes | goes)
    tl.debug_barrier()
    tl.store(local + route, tl.load(slots + expert, expert >= 0, -1), expert >= 0)
    # The tables: [E, matrices].
    i, rank, come = tl.arange(0, C)[:, None], rank_in.to(tl.int64)[:, None], comes[:, None] & is_matrix
    staged, at = buffer + rank * EACH, addresses + 4 * (row + rank * step)
    copy = copies + 3 * (1 + COPIES * rank)
    tl.store(copies, COPIES * count.to(tl.int64))
    for node in tl.static_range(NODES):
        p, to = g + _GEOMETRY + _OF_PIECE * node, copy + 3 * (m * NODES + node)
        bytes_each = tl.load(p + 1, is_matrix, 0)
        tl.store(to, tl.load(p, is_matrix, 0) + place.to(tl.int64)[:, None] * bytes_each, come)
        tl.store(to + 1, staged + tl.load(p + 2, is_matrix, 0), come)
        tl.store(to + 2, bytes_each + tl.zeros_like(rank), come)
    tl.store(at, staged, come)
    for plane in tl.static_range(3):
        first, each = tl.load(g + 3 + plane, is_matrix, 0), tl.load(g + 6 + plane, is_matrix, 0)
        tl.store(at + 1 + plane, first + taken.to(tl.int64)[:, None] * each, come)
    unused = (i >= count) & (i < ROOM) & is_matrix
    tl.store(addresses + 4 * (row + i * step), tl.zeros([C, 4], tl.int64), unused)
    if BIASES > 0:
        is_bias = m < BIASES
        b, to = geometry + _MATRICES * OF_MATRIX + 3 * m, copy + 3 * (_MATRICES * NODES + m)
        come, bytes_each = comes[:, None] & is_bias, tl.load(b + 2, is_bias, 0)
        tl.store(to, tl.load(b, is_bias, 0) + e.to(tl.int64)[:, None] * bytes_each, come)
        tl.store(to + 1, tl.load(b + 1, is_bias, 0) + taken.to(tl.int64)[:, None] * bytes_each, come)
        tl.store(to + 2, bytes_each + tl.zeros_like(rank), come)
    tl.store(fetched, count)
    tl.store(fetched + 1, tl.load(fetched + 1) + count)


def choose_fetched(
    ids: Tensor,
    local: Tensor,
    layer: FetchLayer,
    control: Tensor,
    scratch: Tensor,
    staging: Tensor,
    decay: float,
) -> None:
    """Launches the choice for one layer. ids, local: int32 [n, top_k], columns of wider tensors: the routes' experts,
    negative: none, and their slots, negative: none. local, the layer's map, its scores and its tables are written.
    control: int32 [2]: the share of the missed experts, in 1 / ONE, and the most to fetch. scratch: int32 [3, experts].
    staging: uint8 [experts at a time, bytes]. decay: factor of the scores, per step."""
    rows, top_k = ids.shape
    room, each = staging.shape
    experts = len(layer.slots)
    fetch_kernel(
        (1,), ids, local, layer.slots, layer.places, layer.scores, layer.geometry, layer.copies, layer.addresses,
        layer.fetched, control, scratch, each, layer.nodes, layer.biases,
        rows, top_k, row_stride(ids, local), experts, room,
        decay, next_power_of_2(rows), next_power_of_2(top_k), next_power_of_2(experts), next_power_of_2(room),
        num_warps=4 if experts <= 128 else 8,
    )  # fmt: skip
