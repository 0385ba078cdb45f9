"""The first pass over the logits: applies bias, penalties and masks, and computes the maximum and mass of every
block.

Later passes use the blocks: a block whose maximum is below a threshold is not read again.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.kernels.launch import kernel
from moeserve.kernels.sampling.columns import WORDS, column

TEMPERATURE = column("temperature")
PRESENCE = column("presence_penalty")
FREQUENCY = column("frequency_penalty")
REPETITION = column("repetition_penalty")
DRY_MULTIPLIER = column("dry_multiplier")
DRY_BASE = column("dry_base")
NUM_BIAS = column("num_bias")
NUM_STOP = column("num_stop")
MIN_TOKENS = column("min_tokens")
NUM_OUTPUT = column("num_output")
HISTORY_ROW = column("history_row")


@triton.jit
def float_at(settings, column):
    return tl.load(settings + column).to(tl.float32, bitcast=True)


@triton.jit
def double_at(settings, column):
    return tl.load((settings + column).to(tl.pointer_type(tl.float64)))


@triton.jit
def penalised(x, history, settings):
    """Returns the logits x, float32, after the repetition, frequency and presence penalties. history: int32 for each
    token, 2 * (occurrences in the output) + (1 if in the prompt)."""
    repetition = float_at(settings, REPETITION)
    repeated = tl.where(x > 0, x / repetition, x * repetition)
    x = tl.where(history > 0, repeated, x)
    x -= float_at(settings, FREQUENCY) * (history >> 1).to(tl.float32)
    return x - tl.where(history > 1, float_at(settings, PRESENCE), 0.0)


@triton.jit
def less_repetitive(x, repeats, settings):
    """Returns the logits x, float32, after the DRY penalty multiplier * base^exponent. repeats: int32 for each token,
    0: no penalty, else 1 + the exponent."""
    base = float_at(settings, DRY_BASE).to(tl.float64)
    penalty = float_at(settings, DRY_MULTIPLIER) * tl.exp2((repeats - 1).to(tl.float64) * tl.log2(base))
    return x - tl.where(repeats > 0, tl.minimum(penalty, 3.4028234663852886e38).to(tl.float32), 0.0)


@triton.jit
def allowed_by(bitmask, row, ids, live, VOCAB: tl.constexpr):
    words = tl.load(bitmask + row * ((VOCAB + 31) // 32) + ids // 32, live, 0)
    return ((words >> (ids % 32)) & 1) != 0


@triton.jit
def edit_block(
    logits, settings, bias_ids, bias_values, stop_ids, history, repeats, bitmask, edited, row, slot, first,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, MAX_BIAS: tl.constexpr, MAX_STOP: tl.constexpr,
):  # fmt: skip
    """Writes and returns logits `first` .. first + BLOCK - 1 of a row, float32 [BLOCK], with penalties, masks and logit
    bias applied. logits, edited: pointers to the row [VOCAB]; the others are as in the kernel."""
    c = first + tl.arange(0, BLOCK)
    live = c < VOCAB
    x = tl.load(logits + c, live, float("-inf"))
    history_row = tl.load(settings + HISTORY_ROW).to(tl.int64)
    if history_row >= 0:
        x = penalised(x, tl.load(history + history_row * VOCAB + c, live, 0), settings)
    if repeats is not None:
        x = less_repetitive(x, tl.load(repeats + row * VOCAB + c, live, 0), settings)
    if bitmask is not None:
        x = tl.where(allowed_by(bitmask, row, c, live, VOCAB), x, float("-inf"))
    tl.store(edited + c, x, live)
    for start in range(0, tl.load(settings + NUM_BIAS), 128):
        tl.debug_barrier()  # the block must be written before a biased token's value overwrites it
        n = start + tl.arange(0, 128)
        ids = tl.load(bias_ids + slot * MAX_BIAS + n, n < tl.load(settings + NUM_BIAS), -1)
        here = (ids >= first) & (ids < tl.minimum(first + BLOCK, VOCAB))
        y = tl.load(logits + ids, here, 0.0) + tl.load(bias_values + slot * MAX_BIAS + n, here, 0.0)
        if history_row >= 0:
            y = penalised(y, tl.load(history + history_row * VOCAB + ids, here, 0), settings)
        if repeats is not None:
            y = less_repetitive(y, tl.load(repeats + row * VOCAB + ids, here, 0), settings)
        if bitmask is not None:
            y = tl.where(allowed_by(bitmask, row, ids, here, VOCAB), y, float("-inf"))
        tl.store(edited + ids, y, here)
    if tl.load(settings + NUM_OUTPUT) < tl.load(settings + MIN_TOKENS):
        for start in range(0, tl.load(settings + NUM_STOP), 128):
            tl.debug_barrier()
            n = start + tl.arange(0, 128)
            ids = tl.load(stop_ids + slot * MAX_STOP + n, n < tl.load(settings + NUM_STOP), -1)
            here = (ids >= first) & (ids < tl.minimum(first + BLOCK, VOCAB))
            tl.store(edited + ids, float("-inf"), here)
    tl.debug_barrier()
    return tl.load(edited + c, live, float("-inf"))


@kernel
def scan_kernel(
    logits, slots, count, settings, bias_ids, bias_values, stop_ids, history, repeats, bitmask, edited, block_max,
    block_sum,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, MAX_BIAS: tl.constexpr, MAX_STOP: tl.constexpr,
):  # fmt: skip
    """Edits the logits of rows below count[0], and computes the maximum and mass of each block of BLOCK logits. Grid
    (rows, blocks). logits float32 [n, VOCAB]; slots int32 [n], whose parameters apply to each row.

    repeats int32 [n, VOCAB], optional: dry_kernel's result. edited [n, VOCAB], optional: the logits after bias,
    penalties and masks. block_max float32 [n, blocks]: +inf if the block holds a NaN or +inf; block_sum: sum of
    exp((x - block_max) / temperature), temperature 1 without slots.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if row >= tl.load(count):
        return
    first = block * BLOCK
    c = first + tl.arange(0, BLOCK)
    raw = tl.load(logits + row * VOCAB + c, c < VOCAB, float("-inf"))
    x = raw
    temperature = 1.0
    if slots is not None:
        slot = tl.load(slots + row).to(tl.int64)
        mine = settings + slot * WORDS
        temperature = float_at(mine, TEMPERATURE)
        if edited is not None:
            x = edit_block(
                logits + row * VOCAB, mine, bias_ids, bias_values, stop_ids, history, repeats, bitmask,
                edited + row * VOCAB, row, slot, first, VOCAB, BLOCK, MAX_BIAS, MAX_STOP,
            )  # fmt: skip
    bad = tl.max((~(raw < float("inf")) | ~(x < float("inf"))).to(tl.int32), 0)
    largest = tl.max(x, 0)
    at = row * tl.num_programs(1) + block
    tl.store(block_max + at, tl.where(bad > 0, float("inf"), largest))
    base = tl.where(largest > float("-inf"), largest, 0.0)
    warm = tl.where(temperature > 0, temperature, 1.0)
    tl.store(block_sum + at, tl.sum(tl.exp((x - base) / warm), 0))
