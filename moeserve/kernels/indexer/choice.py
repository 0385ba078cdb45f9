"""The choice of the blocks with the highest scores on a GPU, equal to `reference.choose_keys`.

A score and its block are packed into one number, a key. Keys are ordered like the scores; of two equal scores the first
block's key is higher. So all keys differ, and the TOP highest are those from some threshold on, which is found by
halving an interval of keys and counting.

One program holds the keys of a short row in registers. For longer rows it holds candidates, to which several programs
reduce the row: they derive from a sample of the scores a bound that somewhat more than TOP keys reach (Floyd and
Rivest's SELECT, https://doi.org/10.1145/360680.360691), count the keys that reach it, and collect these in the order of
positions. If too few or too many keys reach the bound, one program halves with all scores, a pass over them per step.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel


@triton.jit
def load_keys(scores, j, end, BITS: tl.constexpr):
    """Returns the keys int64 of the scores j, whose last BITS bits hold j; -1 from `end` on. -0 is 0."""
    score = tl.load(scores + j, j < end, 0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    ordered = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(j < end, (ordered.to(tl.int64) << BITS) | ((1 << BITS) - 1 - j), -1)


@triton.jit
def halve(low, high, middle, reached, fewest, most):
    """Returns the bounds (low, high) of the half of the interval low .. high of thresholds in which to search on, if
    `reached` keys are at least `middle`; (middle, middle) if `reached` is between `fewest` and `most`."""
    new_high = tl.where(reached < fewest, middle - 1, tl.where(reached <= most, middle, high))
    return tl.where(reached < fewest, low, middle), new_high


@triton.jit
def threshold(key, low, fewest, most):
    """Returns a threshold int64, at least `low`, such that between `fewest` and `most` of the keys are at least as
    large. key: int64, all different; at least `fewest` of them must be at least `low`."""
    high = tl.max(key, 0)
    while low < high:
        middle = high - (high - low) // 2
        low, high = halve(low, high, middle, tl.sum((key >= middle).to(tl.int32), 0), fewest, most)
    return low


@triton.jit
def threshold_of_row(scores, end, top, BITS: tl.constexpr, CHUNK: tl.constexpr):
    """Returns the int64 threshold that exactly `top` keys of a row's `end` scores (float32) reach. Reads all scores
    once for each halving of the interval, 32 + BITS times at most."""
    low, high = tl.full([], 0, tl.int64), tl.full([], (1 << (32 + BITS)) - 1, tl.int64)
    while low < high:
        middle = high - (high - low) // 2
        reached = count_keys(scores, 0, end, middle, BITS, CHUNK)
        low, high = halve(low, high, middle, reached, top, top)
    return low


@triton.jit
def count_keys(scores, first, end, low, BITS: tl.constexpr, CHUNK: tl.constexpr):
    """Returns how many keys (see `load_keys`) of the scores `first` .. end - 1 are at least `low`, as int32. scores:
    float32."""
    reached = tl.zeros([CHUNK], tl.int32)
    for at in range(first, end, CHUNK):
        reached += (load_keys(scores, at + tl.arange(0, CHUNK), end, BITS) >= low).to(tl.int32)
    return tl.sum(reached, 0)


@triton.jit
def bound_of_sample(scores, end, TOP: tl.constexpr, SAMPLE: tl.constexpr, BITS: tl.constexpr):
    """Returns a key, int64, that somewhat more than TOP of a row's `end` keys reach, unless the sample happens to
    differ much from the row.

    The sample has one score of each of SAMPLE equal stretches, at a place in it that differs from stretch to stretch,
    as scores may repeat with the text. TOP keys have r in the sample on average, with a deviation of sqrt(r) at most.
    """
    j = tl.arange(0, SAMPLE)
    fraction = ((j * 40503) & 0xFFFF).to(tl.int64)  # 65536 times that of j times the golden ratio
    at = (((j.to(tl.int64) << 16) | fraction) * end) // (SAMPLE << 16)
    r = TOP * SAMPLE / end.to(tl.float32)
    margin = 3.0 * tl.sqrt(r) + 3.0
    fewest, most = (r + margin).to(tl.int32), (r + 1.25 * margin).to(tl.int32)
    return threshold(load_keys(scores, at.to(tl.int32), end, BITS), tl.full([], 0, tl.int64), fewest, most)


@triton.jit
def store_blocks(out, place, block, held, position, live, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Stores the int32 numbers `block` at out[place] where `live`. If SLOTS, stores instead the KV slots (from `held`)
    of each block's BLOCK keys, as far as they are at most at `position`, at out[place * BLOCK ..]."""
    if SLOTS:
        for at in range(BLOCK):
            key = block * BLOCK + at
            there = live & (key <= position)
            tl.store(out + place * BLOCK + at, tl.load(held + key, there, 0), there)
    else:
        tl.store(out + place, block, live)


@triton.jit
def store_from(
    key, bound, written, out, held, position, SLOTS: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr
):
    """Stores the blocks of all keys (int64) that are at least `bound`, after the first `written` entries of `out`.
    Returns the number of entries written so far, as int32. Other arguments as in `store_blocks`."""
    kept = key >= bound
    place = written + tl.cumsum(kept.to(tl.int32), 0) - 1
    store_blocks(out, place, (~key & ((1 << BITS) - 1)).to(tl.int32), held, position, kept, SLOTS, BLOCK)
    return written + tl.sum(kept.to(tl.int32), 0)


@triton.jit
def store_highest(
    key,
    low,
    out,
    held,
    position,
    TOP: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
):
    """Stores the blocks of the TOP highest of the keys (int64) at the beginning of `out`. low: a key that at least TOP
    of them reach. Other arguments as in `store_blocks`."""
    bound = threshold(key, tl.full([], 0, tl.int64) + low, TOP, TOP)
    store_from(key, bound, 0, out, held, position, SLOTS, BLOCK, BITS)


@triton.jit
def load_candidates(room, found, SIZE: tl.constexpr):
    return tl.load(room + tl.arange(0, SIZE), tl.arange(0, SIZE) < found, -1)


@triton.jit
def blocks_of_row(position, BLOCK: tl.constexpr, LOCAL: tl.constexpr):
    """Returns, as int32, how many blocks of BLOCK keys the row at `position` scores, and how many there are up to it.
    LOCAL: number of last blocks that every row attends to without a score; 0: only whole blocks are scored. See
    `ChoiceRule`."""
    blocks = position // BLOCK + 1
    return tl.maximum(blocks - LOCAL, 0) if LOCAL > 0 else (position + 1) // BLOCK, blocks


@triton.jit
def part_of_row(scored, part, PARTS: tl.constexpr, CHUNK: tl.constexpr):
    """Returns the index of the first of the scores of part `part`, and the index after its last one, for a row of
    `scored` scores that PARTS programs share. All parts but the last one have whole chunks of CHUNK scores."""
    size = tl.cdiv(tl.cdiv(scored, CHUNK), PARTS) * CHUNK
    return part * size, tl.minimum(scored, (part + 1) * size)


@triton.jit
def load_counts(room, scored, part, PARTS: tl.constexpr, CANDIDATES: tl.constexpr, CHUNK: tl.constexpr):
    """Returns the bound that a row's candidates reach (int64), and the number of candidates (int32) before part `part`
    and in all parts. room: int64, the row's CANDIDATES candidates, PARTS counts and the bound."""
    q = tl.arange(0, PARTS)
    first, _ = part_of_row(scored, q, PARTS, CHUNK)
    counts = tl.load(room + CANDIDATES + q, first < scored, 0).to(tl.int32)
    return tl.load(room + CANDIDATES + PARTS), tl.sum(tl.where(q < part, counts, 0), 0), tl.sum(counts, 0)


@kernel
def count_kernel(
    scores, scratch, positions, count, first_row,
    STRIDE: tl.constexpr, SCORES: tl.constexpr, CHOICES: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr,
    LOCAL: tl.constexpr, PARTS: tl.constexpr, CANDIDATES: tl.constexpr, SAMPLE: tl.constexpr, BITS: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program writes how many of its keys are candidates, the first one of a row also the least candidate. All
    keys are candidates if there are up to CANDIDATES. Arguments as for `choose_kernel`. Grid (rows, CHOICES, PARTS)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, choice, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(first_row) + i
    if row >= tl.load(count):
        return
    scored, _ = blocks_of_row(tl.load(positions + row), BLOCK, LOCAL)
    first, last = part_of_row(scored, part, PARTS, CHUNK)
    if (scored <= TOP) | (first >= scored):
        return
    line = i.to(tl.int64) * CHOICES + choice
    mine, room = scores + line * STRIDE, scratch + (line * STRIDE + SCORES) // 2
    low = tl.full([], 0, tl.int64)
    if scored > CANDIDATES:
        low = bound_of_sample(mine, scored, TOP, SAMPLE, BITS)
    tl.store(room + CANDIDATES + part, count_keys(mine, first, last, low, BITS, CHUNK).to(tl.int64))
    if part == 0:
        tl.store(room + CANDIDATES + PARTS, low)


@kernel
def collect_kernel(
    scores, scratch, positions, count, first_row,
    STRIDE: tl.constexpr, SCORES: tl.constexpr, CHOICES: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr,
    LOCAL: tl.constexpr, PARTS: tl.constexpr, CANDIDATES: tl.constexpr, BITS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Each program writes its candidates after the candidates of earlier parts. Arguments as for `choose_kernel`. Grid
    (rows, CHOICES, PARTS)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, choice, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(first_row) + i
    if row >= tl.load(count):
        return
    scored, _ = blocks_of_row(tl.load(positions + row), BLOCK, LOCAL)
    first, last = part_of_row(scored, part, PARTS, CHUNK)
    if (scored <= TOP) | (first >= scored):
        return
    line = i.to(tl.int64) * CHOICES + choice
    mine, room = scores + line * STRIDE, scratch + (line * STRIDE + SCORES) // 2
    low, before, found = load_counts(room, scored, part, PARTS, CANDIDATES, CHUNK)
    if found <= CANDIDATES:
        for at in range(first, last, CHUNK):
            key = load_keys(mine, at + tl.arange(0, CHUNK), last, BITS)
            kept = key >= low
            tl.store(room + before + tl.cumsum(kept.to(tl.int32), 0) - 1, key, kept)
            before += tl.sum(kept.to(tl.int32), 0)


@kernel
def choose_kernel(
    scores, scratch, table, req_slots, positions, count, first_row, chosen, lasts,
    TABLE_STRIDE: tl.constexpr, STRIDE: tl.constexpr, SCORES: tl.constexpr, CHOICES: tl.constexpr, TOP: tl.constexpr,
    BLOCK: tl.constexpr, LOCAL: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, PARTS: tl.constexpr,
    SIZE: tl.constexpr, BITS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes the blocks that rows first_row[0] + i < count[0] attend to, by the `ChoiceRule` of TOP, BLOCK and LOCAL,
    in the order of positions: int32 chosen [n, CHOICES, WIDTH]; SLOTS: the KV slots of their keys. lasts int32 [n]:
    the index of a row's own key among the keys of these blocks. Grid (rows, CHOICES).

    scores float32 [rows, CHOICES, STRIDE]: SCORES of the blocks before a row's tail, read if there are more than TOP.
    BITS: those of SCORES. scratch: None with up to SIZE scores; else the same memory as int64. A choice's scores are
    then followed by up to SIZE candidates in the order of positions, from `collect_kernel`, by their number in each of
    PARTS parts, and by the least candidate, both from `count_kernel`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, choice = tl.program_id(0), tl.program_id(1)
    row = tl.load(first_row) + i
    if row >= tl.load(count):
        return
    position = tl.load(positions + row)
    scored, blocks = blocks_of_row(position, BLOCK, LOCAL)
    held = table + tl.load(req_slots + row).to(tl.int64) * TABLE_STRIDE
    out = chosen + (row.to(tl.int64) * CHOICES + choice) * WIDTH
    j, taken, line = tl.arange(0, CHUNK), tl.minimum(scored, TOP), i.to(tl.int64) * CHOICES + choice
    if choice == 0:
        tl.store(lasts + row, taken * BLOCK + position - scored * BLOCK)
    for first in range(scored, blocks, CHUNK):  # the tail
        store_blocks(
            out, taken + first - scored + j, first + j, held, position, first + j < blocks, SLOTS, BLOCK
        )
    mine = scores + line * STRIDE
    if scored <= TOP:
        for first in range(0, scored, CHUNK):
            store_blocks(out, first + j, first + j, held, position, first + j < scored, SLOTS, BLOCK)
    elif scratch is None:
        of_all = load_keys(mine, tl.arange(0, SIZE), scored, BITS)
        store_highest(of_all, 0, out, held, position, TOP, SLOTS, BLOCK, BITS)
    else:
        room = scratch + (line * STRIDE + SCORES) // 2
        low, _, found = load_counts(room, scored, 0, PARTS, SIZE, CHUNK)
        if (found < TOP) | (found > SIZE):
            bound, written = threshold_of_row(mine, scored, TOP, BITS, CHUNK), tl.full([], 0, tl.int32)
            for first in range(0, scored, CHUNK):
                key = load_keys(mine, first + j, scored, BITS)
                written = store_from(key, bound, written, out, held, position, SLOTS, BLOCK, BITS)
        elif found <= SIZE // 2:
            few = load_candidates(room, found, SIZE // 2)
            store_highest(few, low, out, held, position, TOP, SLOTS, BLOCK, BITS)
        else:
            candidates = load_candidates(room, found, SIZE)
            store_highest(candidates, low, out, held, position, TOP, SLOTS, BLOCK, BITS)
