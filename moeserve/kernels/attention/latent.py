"""Latent attention in absorbed form (https://arxiv.org/abs/2405.04434): many heads attend to one vector per token,
whose first part is also the value. For decode rows, with keys split over programs, and for prefill chunks.

A program processes some heads of a row, or of a tile of rows, as one block of query rows, so that each loaded key
serves all of them, in the scores and as a value. The latent and the rotated part of a key are loaded and multiplied
separately: together they would have to be padded to a power of two.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def splits_of(end, BLOCK: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr):
    """Returns into how many splits a row's `end` keys are divided, and the keys per split, both int32 scalars. There
    are at most SPLITS splits, each of whole blocks of BLOCK keys and of at least LEAST blocks; the last may have fewer
    keys."""
    per = tl.maximum(tl.cdiv(tl.cdiv(end, BLOCK), SPLITS), LEAST) * BLOCK
    return tl.cdiv(end, per), per


@kernel
def latent_attention_kernel(
    q, rotated, keys, table, tiles, req_slots, positions, count, part_sums, part_stats, out,
    TABLE_STRIDE: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, ROTARY: tl.constexpr, G: tl.constexpr,
    ROWS: tl.constexpr, RANK_SIZE: tl.constexpr, ROTARY_SIZE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes latent attention of decode rows, or without SPLITS of a prompt's tiles. Grid (rows, blocks of G heads,
    SPLITS), or without SPLITS (tiles, blocks of G heads).

    q [n, HEADS, RANK] and rotated [n, HEADS, ROTARY] (not read if ROTARY is 0), scaled; keys [slots, RANK + ROTARY], of
    the same dtype; out [n, HEADS, RANK]. Row i < count[0] attends to the slots table[req_slots[i], : positions[i] + 1].
    With tiles int32 [tiles, 4] (first row, rows, its position, request slot), each row of a tile attends up to its own
    position. A row of one split is stored in `out`; of others each split stores its unnormalised sum in part_sums [n,
    blocks, SPLITS, ROWS, RANK_SIZE], its largest scores and the sums of its weights in part_stats [.., 2], float32, for
    `combine_kernel`. LEAST: minimum of blocks of BLOCK keys per split. ROWS: a power of two that holds a tile's rows
    times G; *_SIZE: powers of two that hold RANK and ROTARY.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if tiles is None:
        i = tl.program_id(0)
        if i >= tl.load(count):
            return
        row, rows = i, 1
        start, req_slot = tl.load(positions + i), tl.load(req_slots + i)
    else:
        # A sequence's last tiles have the most keys, so they start first.
        tile = tiles + (tl.num_programs(0) - 1 - tl.program_id(0)) * 4
        row, rows, start, req_slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    block, split = tl.program_id(1), tl.program_id(2)
    end = start + rows
    splits, per = splits_of(end, BLOCK, SPLITS, LEAST)
    if split >= splits:
        return
    m, d, e = tl.arange(0, ROWS), tl.arange(0, RANK_SIZE)[None, :], tl.arange(0, ROTARY_SIZE)[None, :]
    head = block * G + m % G
    live = ((m // G < rows) & (head < HEADS))[:, None]
    at = ((row + m // G).to(tl.int64) * HEADS + head)[:, None]
    query = tl.load(q + at * RANK + d, live & (d < RANK), 0.0)
    if ROTARY:
        query_rotated = tl.load(rotated + at * ROTARY + e, live & (e < ROTARY), 0.0)
    # Rows beyond the tile attend to the keys of its last row, so that no row has no keys.
    position = start + tl.minimum(m // G, rows - 1)
    held = table + req_slot.to(tl.int64) * TABLE_STRIDE
    acc = tl.zeros([ROWS, RANK_SIZE], tl.float32)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    last = tl.minimum(end, (split + 1) * per)
    for first in range(split * per, last, BLOCK):
        p = first + tl.arange(0, BLOCK)
        there = p < last
        slot = (tl.load(held + p, there, 0).to(tl.int64) * (RANK + ROTARY))[:, None]
        k = tl.load(keys + slot + d, there[:, None] & (d < RANK), 0.0)
        if ROTARY:
            k_rotated = tl.load(keys + slot + RANK + e, there[:, None] & (e < ROTARY), 0.0)
            scores = tl.dot(query_rotated, tl.trans(k_rotated))
            scores = tl.dot(query, tl.trans(k), scores) * LOG2E
        else:
            scores = tl.dot(query, tl.trans(k)) * LOG2E
        seen = there[None, :] & (p[None, :] <= position[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        shrink = tl.exp2(largest - new)
        acc = tl.dot(weights.to(k.dtype), k, acc * shrink[:, None])
        total = total * shrink + tl.sum(weights, 1)
        largest = new
    to = out + at * RANK + d
    if splits == 1:
        tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), live & (d < RANK))
    elif SPLITS > 1:
        place = row * tl.num_programs(1) + block
        part = (place * SPLITS + split) * ROWS + m
        tl.store(part_sums + part[:, None] * RANK_SIZE + d, acc)
        tl.store(part_stats + part * 2, largest)
        tl.store(part_stats + part * 2 + 1, total)


@kernel
def combine_kernel(
    positions, count, part_sums, part_stats, out,
    HEADS: tl.constexpr, RANK: tl.constexpr, G: tl.constexpr, RANK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combines the results of rows with several splits, all splits at once. It is a kernel of its own, because the
    last program of a block of G heads would have to read up to 2 MB of results alone. Arguments as for
    `latent_attention_kernel`, with ROWS of G. Grid (n, HEADS, RANK_SIZE / COLUMNS)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, head = tl.program_id(0), tl.program_id(1)
    if i >= tl.load(count):
        return
    splits, _ = splits_of(tl.load(positions + i) + 1, BLOCK, SPLITS, LEAST)
    if splits == 1:
        return
    j, d = tl.arange(0, SPLITS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    row, there = i.to(tl.int64), j < splits
    part = ((row * tl.cdiv(HEADS, G) + head // G) * SPLITS + j) * G + head % G
    largest = tl.load(part_stats + part * 2, there, float("-inf"))
    total = tl.load(part_stats + part * 2 + 1, there, 0.0)
    sums = tl.load(part_sums + part[:, None] * RANK_SIZE + d[None, :], there[:, None], 0.0)
    share = tl.exp2(largest - tl.max(largest, 0))
    result = tl.sum(sums * share[:, None], 0) / tl.sum(total * share, 0)
    tl.store(out + (row * HEADS + head) * RANK + d, result.to(out.dtype.element_ty), d < RANK)
