"""The router's choice: softmax, top-k and renormalisation of a token's logits, all in registers."""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel


@kernel
def route_kernel(
    logits, expert_map, count, ids, local_expert_ids, weights, expert_token_counts,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BT: tl.constexpr, E: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per BT rows. logits [n, EXPERTS]; ids, local_expert_ids int32 and weights float32 [n, TOP_K].

    local_expert_ids: expert_map[ids], where given: an expert's place among those on this device, below 0 elsewhere.
    Rows from count[0] on get ids -1 and weights 0. expert_token_counts int64 [EXPERTS], where given: tokens are
    added to it.
    E, K: powers of two that hold EXPERTS and TOP_K.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    existing = tl.load(count)
    e, k = tl.arange(0, E)[None, :], tl.arange(0, K)[None, :]
    left = tl.load(logits + t[:, None] * EXPERTS + e, e < EXPERTS, float("-inf")).to(tl.float32)
    live = t < existing
    chosen = tl.zeros([BT, K], tl.int32)
    scores = tl.full([BT, K], float("-inf"), tl.float32)
    for j in tl.static_range(TOP_K):
        best = tl.max(left, 1)[:, None]
        # Of equals the lowest id. (With a NaN none is equal: any id in range will do.)
        at = tl.min(tl.where(left == best, e, EXPERTS - 1), 1)[:, None]
        left = tl.where(e == at, float("-inf"), left)
        chosen = tl.where(k == j, at, chosen)
        scores = tl.where(k == j, best, scores)
    likely = tl.exp(scores - tl.max(scores, 1)[:, None])
    share = tl.where(live[:, None], likely / tl.sum(likely, 1)[:, None], 0.0)
    at = t[:, None] * TOP_K + k
    stored = (t < tl.num_programs(0) * BT)[:, None] & (k < TOP_K)
    tl.store(weights + at, share, stored)
    tl.store(ids + at, tl.where(live[:, None], chosen, -1), stored)
    there = live[:, None] & (k < TOP_K)
    if expert_map is not None:
        local = tl.load(expert_map + chosen, there, -1)
        tl.store(local_expert_ids + at, local, stored)
    if expert_token_counts is not None:
        tl.atomic_add(expert_token_counts + chosen, 1, there, sem="relaxed")


@kernel
def select_streamed_routes_kernel(
    ids, expert_map, streamed_ids, local_expert_ids,
    ROUTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program per BLOCK of the ROUTES of all rows. streamed_ids = expert_map[ids], -1 for ids below 0;
    local_expert_ids: the larger of what is there and that. All int32."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + r, r < ROUTES, -1)
    place = tl.load(expert_map + expert, expert >= 0, -1)
    before = tl.load(local_expert_ids + r, r < ROUTES, -1)
    tl.store(streamed_ids + r, place, r < ROUTES)
    tl.store(local_expert_ids + r, tl.maximum(place, before), r < ROUTES)
