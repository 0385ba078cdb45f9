"""The second pass over the logits: chooses a row's token from the blocks that `scan.py` has summarised."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.kernels.launch import kernel
from moeserve.kernels.sampling.chain import ORDER, chain_and_draw
from moeserve.kernels.sampling.columns import WORDS, column
from moeserve.kernels.sampling.dry import note_in_record
from moeserve.kernels.sampling.filter_and_draw import filter_and_draw, first_largest
from moeserve.kernels.sampling.philox import uniform_at
from moeserve.kernels.sampling.scan import HISTORY_ROW, NUM_OUTPUT, TEMPERATURE, float_at

SEED = column("seed")
NOT_FINITE = tl.constexpr(-1)  # instead of a token, as is the next one
NONE_ALLOWED = tl.constexpr(-2)
DRAW_STREAM = tl.constexpr(0)  # numbers as in sampling.h
XTC_STREAM = tl.constexpr(1)


@triton.jit
def has_any(x, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Returns whether the float32 row x [VOCAB] has any value other than -inf."""
    largest = tl.full([], float("-inf"), tl.float32)
    for block in range(BLOCKS):
        c = block * BLOCK + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.max(tl.load(x + c, c < VOCAB, float("-inf")), 0))
    return largest > float("-inf")


@kernel
def filter_and_draw_kernel(
    x, raw, slots, count, settings, history, ahead, block_max, block_sum, values, ids, tokens,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, B: tl.constexpr, HAS_CHAINS: tl.constexpr,
):  # fmt: skip
    """Draws a token for each row of x float32 [n, VOCAB], which scan_kernel has scanned, and writes it to tokens int32
    [n]: NOT_FINITE if the row is not finite, NONE_ALLOWED if the row is finite before its edits (raw [n, VOCAB],
    optional) and they left no token. A program per row below count[0]. Records the token as its slot's output. ahead
    int32 [n], optional: number of earlier tokens of the row's slot in this call; then nothing is recorded, and no slot
    may have a history, an order of samplers or DRY. values float32, ids int32 [n, VOCAB]: scratch for candidates. B: a
    power of two that holds BLOCKS. HAS_CHAINS: slots may have an order of samplers or DRY."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(count):
        return
    slot = tl.load(slots + row).to(tl.int64)
    settings += slot * WORDS
    b = tl.arange(0, B)
    maxima = tl.load(block_max + row * BLOCKS + b, b < BLOCKS, float("-inf"))
    sums = tl.load(block_sum + row * BLOCKS + b, b < BLOCKS, 0.0)
    top = tl.max(maxima, 0)
    position = tl.load(settings + NUM_OUTPUT)
    if ahead is not None:
        position += tl.load(ahead + row)
    token = tl.full([], NOT_FINITE, tl.int32)
    if (top < float("inf")) & (top > float("-inf")):
        is_chain = False
        if HAS_CHAINS:
            is_chain = tl.load(settings + ORDER) != 0
        if is_chain:
            seed = tl.load((settings + SEED).to(tl.pointer_type(tl.uint64)))
            token = chain_and_draw(
                x + row * VOCAB, settings, block_max + row * BLOCKS, maxima, top,
                uniform_at(seed, position.to(tl.uint64), DRAW_STREAM),
                uniform_at(seed, position.to(tl.uint64), XTC_STREAM), values + row * VOCAB, ids + row * VOCAB,
                VOCAB, BLOCK, BLOCKS,
            )  # fmt: skip
        elif float_at(settings, TEMPERATURE) == 0:
            token = first_largest(x + row * VOCAB, maxima, top, VOCAB, BLOCK)
        else:
            seed = tl.load((settings + SEED).to(tl.pointer_type(tl.uint64)))
            token = filter_and_draw(
                x + row * VOCAB, settings, block_max + row * BLOCKS, maxima, sums, top,
                uniform_at(seed, position.to(tl.uint64), DRAW_STREAM), values + row * VOCAB, ids + row * VOCAB,
                VOCAB, BLOCK, BLOCKS,
            )  # fmt: skip
        # It is one already; this protects the writes that follow.
        token = tl.minimum(tl.maximum(token, 0), VOCAB - 1)
        if ahead is None:
            tl.store(settings + NUM_OUTPUT, position + 1)
            history_row = tl.load(settings + HISTORY_ROW).to(tl.int64)
            if history_row >= 0:
                at = history + history_row * VOCAB + token
                tl.store(at, tl.load(at) + 2)
            if HAS_CHAINS:
                note_in_record(settings, token)
    elif raw is not None:  # noqa: SIM102  (decided when it is compiled)
        if (top < float("inf")) & has_any(raw + row * VOCAB, VOCAB, BLOCK, BLOCKS):
            token = tl.full([], NONE_ALLOWED, tl.int32)
    tl.store(tokens + row, token)
