"""Looks up rows of the token embedding and dequantises them from planes, so that a tied head can share the table."""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.embed import reference
from moeserve.kernels.launch import kernel
from moeserve.kernels.planes.books_triton import load_eight
from moeserve.kernels.planes.triton import (
    BYTE_ONES,
    e4m3_numbers,
    load_words,
    merge_codes,
    scale_and_min,
    super_word,
)

EMBEDDED = tl.constexpr(reference.EMBEDDED)  # x of such a row is written before the step's kernels


@kernel
def embed_kernel(
    ids, count, codes, scales, supers, x, slot_table, req_slots, positions, kv_slots, window_table, window_slots,
    ROWS: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr, REQUESTS: tl.constexpr, LENGTH: tl.constexpr,
    SCALE: tl.constexpr, STREAMS: tl.constexpr, FILLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes x[i, s] = row ids[i] * SCALE, float32 [n, STREAMS, COLS]; grid (n, units). codes: uint8 pointers, or
    floats if F is None. With slot_table int32 [REQUESTS, LENGTH], slot_table[req_slots[i], positions[i]] =
    kv_slots[i]; with window_table, likewise window_slots[i]. An id out of range reads the nearest of the ROWS; entries
    outside the tables are not written. x of a row with the id EMBEDDED is not written; with FILLS, it is row 0.

    The first kernel of a step. It is launched without programmatic dependent launch: it starts when all earlier
    work has ended and is visible. So later kernels may read the step's inputs before they wait for the kernel before
    them. In the slot table they may read only the entries of earlier steps' tokens, which this kernel leaves alone."""
    if PDL:
        gdc_launch_dependents()
    UNITS: tl.constexpr = (COLS + 127) // 128
    i, u = tl.program_id(0), tl.program_id(1)
    existing, id = tl.load(count), tl.load(ids + i)
    row = tl.minimum(tl.maximum(id, 0), ROWS - 1).to(tl.int64)
    if i >= existing:
        return
    if slot_table is not None:
        request, position = tl.load(req_slots + i), tl.load(positions + i)
        inside = (request >= 0) & (request < REQUESTS) & (position >= 0) & (position < LENGTH)
        entry = request.to(tl.int64) * LENGTH + position
        tl.store(slot_table + entry, tl.load(kv_slots + i), (u == 0) & inside)
        if window_table is not None:
            tl.store(window_table + entry, tl.load(window_slots + i), (u == 0) & inside)
    c = tl.arange(0, 128)
    live = u * 128 + c < COLS
    if F is None:
        value = tl.load(codes + row * COLS + u * 128 + c, live, 0.0).to(tl.float32)
    elif F.is_book:
        q0, q1, scale = load_eight(codes, scales, supers, row, u + c * 0, c // 32, c % 32 // 8, live, COLS, F)
        word = tl.where(c % 8 < 4, q0, q1)
        value = ((word << (24 - 8 * (c % 4))) >> 24).to(tl.float32) * scale
    else:
        f = c // 16
        at = codes + row * (F.parts * UNITS * 16) + u * 16 + c % 16
        low = tl.load(at + (f * F.low_bits // 8) * (UNITS * 16)).to(tl.int32)
        high = low
        if F.high_bits > 0:
            high = tl.load(at + (F.low_bits + f * F.high_bits // 8) * (UNITS * 16)).to(tl.int32)
        q = merge_codes(low, high, f * F.low_bits % 8, f * F.high_bits % 8, F, BYTE_ONES)
        if F.is_signed:
            q = q.to(tl.uint8).to(tl.int8, bitcast=True)
        d = c
        if F.has_super:
            d = super_word(tl.load(supers + row * ((COLS + 255) // 256) + u // 2 + c * 0), u, F)
        g = c // F.scale_group
        word, min_word = load_words(scales + (row * UNITS + u) * F.words + c * 0, g, live, F)
        s, m = scale_and_min(word, min_word, d, g, F)
        if F.e4m3:
            value = e4m3_numbers(low) * s
        else:
            value = q.to(tl.float32) * s - m
    if SCALE != 1.0:
        value *= SCALE
    for stream in tl.static_range(STREAMS):
        at = (i.to(tl.int64) * STREAMS + stream) * COLS + u * 128
        tl.store(x + at + c, value, live & (FILLS | (id != EMBEDDED)))


@kernel
def add_deep_kernel(
    ids, count, deep, x, STRIDE: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Computes x[i] += deep[i] for rows with the id EMBEDDED; x float32 [n, COLS], deep float32 at rows STRIDE apart;
    grid (n, COLS / BLOCK)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (i < tl.load(count)) & (tl.load(ids + i) == EMBEDDED) & (c < COLS)
    row = i.to(tl.int64)
    added = tl.load(deep + row * STRIDE + c, live, 0.0)
    at = x + row * COLS + c
    tl.store(at, tl.load(at, live, 0.0) + added, live)


@kernel
def take_sampled_kernel(ids, sampled, N: tl.constexpr, SAMPLED: tl.constexpr, BLOCK: tl.constexpr):
    """Replaces -1 - i in ids int32 [N] by sampled[i], one of SAMPLED tokens, or by 0 if that is negative; EMBEDDED
    stays; grid (N / BLOCK)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < N
    id = tl.load(ids + row, mask=there, other=0)
    awaited = (id < 0) & (id != EMBEDDED)
    token = tl.load(sampled + tl.minimum(-1 - id, SAMPLED - 1), mask=awaited, other=0)
    tl.store(ids + row, tl.maximum(token, 0), mask=awaited)
