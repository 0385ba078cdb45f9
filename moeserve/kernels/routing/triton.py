"""The router's choice: scores, top-k and weights from a token's logits, all in registers."""

# mypy: ignore-errors
# ruff: noqa: RUF005
# (Triton compiles no starred tuples.)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.routing.reference import SIGMOID_EPS

EPS = tl.constexpr(SIGMOID_EPS)


@triton.jit
def scores_of(logits, SCORING: tl.constexpr):
    """Returns the scores of all experts' logits [BT, E], -inf beyond the experts."""
    if SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    elif SCORING == "softmax":
        likely = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = likely / tl.sum(likely, 1)[:, None]
    elif SCORING == "sqrt_softplus":
        # log(1 + exp(x)) without overflow. If exp(x) is so small that 1 + exp(x) rounds to 1, log(1 + exp(x)) is
        # exp(x).
        small = tl.exp(-tl.abs(logits))
        scores = tl.maximum(logits, 0.0) + tl.where(small < 1e-4, small, tl.log(1.0 + small))
        scores = tl.sqrt(scores)
    else:
        scores = logits
    return scores


@triton.jit
def within_groups(
    choosing, e, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr
):  # fmt: skip
    """Returns choosing [BT, E] with -inf outside the TOP_GROUPS groups with the largest sums of their GROUP_BEST
    best; lower groups first among equals."""
    WIDTH: tl.constexpr = EXPERTS // GROUPS
    sums = ()
    for g in tl.static_range(GROUPS):
        mine = tl.where((e // WIDTH == g) & (e < EXPERTS), choosing, float("-inf"))
        best = tl.max(mine, 1)[:, None]
        if WIDTH > 1 and GROUP_BEST > 1:
            at = tl.min(tl.where(mine == best, e, EXPERTS - 1), 1)[:, None]
            best += tl.max(tl.where(e == at, float("-inf"), mine), 1)[:, None]
        sums = sums + (best,)
    for g in tl.static_range(GROUPS):
        rank = tl.zeros(sums[0].shape, tl.int32)
        for other in tl.static_range(GROUPS):
            if other < g:
                rank += (sums[other] >= sums[g]).to(tl.int32)
            elif other > g:
                rank += (sums[other] > sums[g]).to(tl.int32)
        choosing = tl.where((e // WIDTH == g) & (rank >= TOP_GROUPS), float("-inf"), choosing)
    return choosing


@triton.jit
def chosen_weights(
    chosen, all_logits, TOP_K: tl.constexpr, K: tl.constexpr, SCORING: tl.constexpr, NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """Returns float32 [BT, K] weights from the chosen experts' logits [BT, K], which are -inf beyond TOP_K."""
    if SCORING == "softmax_topk" or (SCORING == "softmax" and NORMALIZE):
        # A softmax over all experts and its renormalisation over the chosen is a softmax over the chosen.
        likely = tl.exp(chosen - tl.max(chosen, 1)[:, None])
        weights = likely / tl.sum(likely, 1)[:, None]
    elif SCORING == "softmax":
        top = tl.max(all_logits, 1)[:, None]
        weights = tl.exp(chosen - top) / tl.sum(tl.exp(all_logits - top), 1)[:, None]
    else:
        weights = tl.where(tl.arange(0, K)[None, :] < TOP_K, scores_of(chosen, SCORING), 0.0)
        if NORMALIZE:
            weights = weights / (tl.sum(weights, 1)[:, None] + EPS)
    if SCALE != 1.0:
        weights *= SCALE
    return weights


@triton.jit
def ordered_bits(x):
    """Returns the bits of float32 x [..] as int32 in the same order as x, where 0 and -0 are equal. A warp finds the
    largest of its int32 in one instruction, of its floats in five, one after another."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_ordered_bits(bits):
    """Returns the float32 whose `ordered_bits` are given."""
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_of(choosing, all_logits, e, k, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BY_LOGITS: tl.constexpr):
    """Returns the ids of the TOP_K highest numbers of `choosing`, the lower id first among equals, and the logits of
    these ids: int32 and float32 [BT, K], beyond TOP_K 0 and -inf. `choosing` float32 [BT, E]: the scores by which
    experts are chosen. If BY_LOGITS, they are the logits; else all_logits [BT, E] has the logits."""
    LEAST: tl.constexpr = -0x80000000  # below -inf
    chosen = tl.zeros([choosing.shape[0], k.shape[1]], tl.int32)
    scores = tl.full([choosing.shape[0], k.shape[1]], LEAST, tl.int32)
    order = ordered_bits(choosing)
    if not BY_LOGITS:
        logits = ordered_bits(all_logits)
    for j in tl.static_range(TOP_K):
        best = tl.max(order, 1)[:, None]
        at = tl.min(tl.where(order == best, e, EXPERTS - 1), 1)[:, None]  # the lowest id among equals
        order = tl.where(e == at, LEAST, order)
        chosen = tl.where(k == j, at, chosen)
        if not BY_LOGITS:
            best = tl.max(tl.where(e == at, logits, LEAST), 1)[:, None]
        scores = tl.where(k == j, best, scores)
    return chosen, tl.where(k < TOP_K, from_ordered_bits(scores), float("-inf"))


@kernel
def route_kernel(
    logits, bias, expert_scale, expert_map, by_token, token_ids, count, ids, local_expert_ids, weights,
    expert_token_counts,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, STRIDE: tl.constexpr, SCORING: tl.constexpr, NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, BT: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Chooses each row's TOP_K experts and their weights. A program per BT rows. logits [n, EXPERTS]; bias,
    expert_scale float32 [EXPERTS], optional; ids, local_expert_ids int32 and weights float32 [n, TOP_K], rows STRIDE
    apart. The options are `RouterOptions`'.

    local_expert_ids, optional: expert_map[ids], an expert's index on this device, negative if elsewhere. The map is
    read once per route, because it may change meanwhile. Rows from count[0] on get ids -1 and weights 0.
    expert_token_counts int64 [EXPERTS], optional: tokens are added. by_token int32 [vocab, TOP_K], optional: the
    experts of each token id, which token_ids int32 [n] names; the logits then only weigh them. E, K: powers of two that
    hold EXPERTS and TOP_K.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    existing = tl.load(count)
    e, k = tl.arange(0, E)[None, :], tl.arange(0, K)[None, :]
    choosing = tl.load(logits + t[:, None] * EXPERTS + e, e < EXPERTS, float("-inf")).to(tl.float32)
    # Scores increase with their logits, so the logits, which are already loaded, choose the same experts.
    BY_LOGITS: tl.constexpr = bias is None and GROUPS == 1
    all_logits = choosing
    if not BY_LOGITS:
        choosing = scores_of(choosing, SCORING)
        if bias is not None:
            choosing += tl.load(bias + e, e < EXPERTS, 0.0)
        choosing = tl.where(e < EXPERTS, choosing, float("-inf"))
        if GROUPS > 1:
            choosing = within_groups(choosing, e, EXPERTS, GROUPS, TOP_GROUPS, GROUP_BEST)
    live = t < existing
    if by_token is not None:
        of_token = tl.maximum(tl.load(token_ids + t, live, 0), 0).to(tl.int64)  # below 0: an embedding's row
        chosen = tl.load(by_token + of_token[:, None] * TOP_K + k, k < TOP_K, 0)
        scores = tl.load(logits + t[:, None] * EXPERTS + chosen, k < TOP_K, float("-inf")).to(tl.float32)
    else:
        chosen, scores = best_of(choosing, all_logits, e, k, EXPERTS, TOP_K, BY_LOGITS)
    share = chosen_weights(scores, all_logits, TOP_K, K, SCORING, NORMALIZE, SCALE)
    if expert_scale is not None:
        share *= tl.load(expert_scale + chosen)
    share = tl.where(live[:, None], share, 0.0)
    at = t[:, None] * STRIDE + k
    stored = (t < tl.num_programs(0) * BT)[:, None] & (k < TOP_K)
    tl.store(weights + at, share, stored)
    tl.store(ids + at, tl.where(live[:, None], chosen, -1), stored)
    there = live[:, None] & (k < TOP_K)
    if expert_map is not None:
        # Volatile: an expert may arrive while the step runs. Kernels that read its slot are launched after this
        # one.
        local = tl.load(expert_map + chosen, there, -1, volatile=True)
        tl.store(local_expert_ids + at, local, stored)
    if expert_token_counts is not None:
        tl.atomic_add(expert_token_counts + chosen, 1, there, sem="relaxed")


@kernel
def select_streamed_routes_kernel(
    ids, expert_map, streamed_ids, local_expert_ids,
    ROUTES: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes streamed_ids = expert_map[ids], -1 for negative ids, and local_expert_ids = max(local_expert_ids,
    streamed_ids), all int32. A program per BLOCK of the ROUTES of all rows, TOP_K per row, rows STRIDE apart."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = r < ROUTES
    if STRIDE != TOP_K:
        r = r // TOP_K * STRIDE + r % TOP_K
    expert = tl.load(ids + r, live, -1)
    place = tl.load(expert_map + expert, (expert >= 0) & (expert < EXPERTS), -1)
    before = tl.load(local_expert_ids + r, live, -1)
    tl.store(streamed_ids + r, place, live)
    tl.store(local_expert_ids + r, tl.maximum(place, before), live)
