"""The choice of the blocks with the highest scores on a GPU, equal to `reference.choose_keys`.

A program chooses for one row. Four passes over the bits of the scores, eight at a time, count how many scores have
each value of these bits among those that can still be the lowest chosen score (radix selection). Another pass writes
the blocks in the order of positions. The first pass reads the scores from memory, the others mostly from the cache.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel

DIGITS = tl.constexpr(256)


@triton.jit
def load_ordered(scores, j, end):
    """Returns the scores j < end as uint32 in the order of the numbers; -0 is 0."""
    score = tl.load(scores + j, j < end, 0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def lowest_chosen(scores, end, TOP: tl.constexpr, CHUNK: tl.constexpr):
    """Returns the TOP-th highest of the scores below `end`, as `load_ordered` gives it, and how many scores equal to it
    are chosen. `end` is above TOP."""
    digit = tl.arange(0, DIGITS)
    known, left = tl.full([], 0, tl.uint32), tl.full([], TOP, tl.int32)
    for step in tl.static_range(4):
        counts = tl.zeros([DIGITS], tl.int32)
        for first in range(0, end, CHUNK):
            j = first + tl.arange(0, CHUNK)
            value = load_ordered(scores, j, end)
            candidate = j < end
            if step > 0:
                candidate &= (value >> (32 - 8 * step)) == known
            # Others count as 0, and are taken off again: so the histogram needs no mask.
            bits = tl.where(candidate, ((value >> (24 - 8 * step)) & (DIGITS - 1)).to(tl.int32), 0)
            others = CHUNK - tl.sum(candidate.to(tl.int32), 0)
            counts += tl.histogram(bits, DIGITS) - tl.where(digit == 0, others, 0)
        higher = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # scores with a higher digit
        is_it = (higher < left) & (higher + counts >= left)
        known = (known << 8) | tl.sum(tl.where(is_it, digit, 0), 0).to(tl.uint32)
        left -= tl.sum(tl.where(is_it, higher, 0), 0)
    return known, left


@triton.jit
def store_blocks(out, place, block, held, live, SLOTS: tl.constexpr):
    if SLOTS:
        tl.store(out + place, tl.load(held + block, live, 0), live)
    else:
        tl.store(out + place, block, live)


@kernel
def choose_kernel(
    scores, table, req_slots, positions, count, first_row, chosen, lasts,
    TABLE_STRIDE: tl.constexpr, SCORES_STRIDE: tl.constexpr, CHOICES: tl.constexpr, TOP: tl.constexpr,
    BLOCK: tl.constexpr, LOCAL: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, CHOICES). Writes the blocks that rows first_row[0] + i < count[0] attend to, by the `ChoiceRule` of
    TOP, BLOCK and LOCAL, in the order of positions: int32 chosen [n, CHOICES, WIDTH]; SLOTS: their KV slots, with
    blocks of one key. lasts int32 [n]: the index of a row's own key among the keys of these blocks.

    scores float32 [rows, CHOICES, SCORES_STRIDE] of the blocks before a row's tail, read if there are more than TOP.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, choice = tl.program_id(0), tl.program_id(1)
    row = tl.load(first_row) + i
    if row >= tl.load(count):
        return
    position = tl.load(positions + row)
    blocks = position // BLOCK + 1
    scored = tl.maximum(blocks - LOCAL, 0) if LOCAL > 0 else (position + 1) // BLOCK
    held = table + tl.load(req_slots + row).to(tl.int64) * TABLE_STRIDE
    out = chosen + (row.to(tl.int64) * CHOICES + choice) * WIDTH
    j = tl.arange(0, CHUNK)
    taken = tl.minimum(scored, TOP)
    if choice == 0:
        tl.store(lasts + row, taken * BLOCK + position - scored * BLOCK)
    if scored <= TOP:
        for first in range(0, scored, CHUNK):
            store_blocks(out, first + j, first + j, held, first + j < scored, SLOTS)
    else:
        mine = scores + (i.to(tl.int64) * CHOICES + choice) * SCORES_STRIDE
        lowest, ties = lowest_chosen(mine, scored, TOP, CHUNK)
        written = tl.full([], 0, tl.int32)
        for first in range(0, scored, CHUNK):
            value = load_ordered(mine, first + j, scored)
            there = first + j < scored
            tie = there & (value == lowest)
            rank = tl.cumsum(tie.to(tl.int32), 0)
            kept = (there & (value > lowest)) | (tie & (rank <= ties))
            place = written + tl.cumsum(kept.to(tl.int32), 0) - 1
            store_blocks(out, place, first + j, held, kept, SLOTS)
            written += tl.sum(kept.to(tl.int32), 0)
            ties -= tl.sum(tie.to(tl.int32), 0)
    for first in range(scored, blocks, CHUNK):  # the tail
        store_blocks(out, taken + first - scored + j, first + j, held, first + j < blocks, SLOTS)
