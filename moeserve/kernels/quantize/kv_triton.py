"""A q8_0 KV cache in kernels: `kv.py` has the arithmetic. Codes and scales are two tensors, as they are in memory."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

KV_BLOCK = tl.constexpr(32)


@triton.jit
def quantize_kv(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """float32 [ROWS, SIZE] to int8 codes [ROWS, SIZE] and float16 scales [ROWS, SIZE / 32]."""
    blocks = tl.reshape(x, [ROWS, SIZE // KV_BLOCK, KV_BLOCK])
    nothing = tl.sum(blocks * 0.0, 2)  # NaN where a number is not finite
    scales = (tl.max(tl.abs(blocks), 2) / 127.0 + nothing).to(tl.float16)
    kept = scales.to(tl.float32)
    scaled = blocks * tl.where(kept > 0, 1.0 / kept, 0.0)[:, :, None]
    # Adding 1.5 * 2^23 rounds to an integer, ties to even, as the reference does.
    codes = (scaled + 12582912.0) - 12582912.0
    codes = tl.minimum(tl.maximum(codes, -127.0), 127.0)
    return tl.reshape(codes.to(tl.int8), [ROWS, SIZE]), scales


@triton.jit
def dequantize_kv(codes, scales, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """The other way, to float16."""
    blocks = tl.reshape(codes.to(tl.float16), [ROWS, SIZE // KV_BLOCK, KV_BLOCK])
    return tl.reshape(blocks * scales[:, :, None], [ROWS, SIZE])


@triton.jit
def store_kv(numbers, scales, at, x, live, DIM: tl.constexpr, SIZE: tl.constexpr):
    """One head's float32 x [1, SIZE], of which DIM are, to its place `at` in a layer's keys or values: rounded to their
    type, or quantised where there are scales. `live`: whether at all. Gives what attention will read, [1, SIZE]."""
    d = tl.arange(0, SIZE)[None, :]
    if scales is None:
        kept = x.to(numbers.dtype.element_ty)
        tl.store(numbers + at + d, kept, (d < DIM) & live)
    else:
        groups: tl.constexpr = SIZE // KV_BLOCK
        codes, each = quantize_kv(tl.where(d < DIM, x, 0.0), 1, SIZE)
        g = tl.arange(0, groups)[None, :]
        tl.store(numbers + at + d, codes, (d < DIM) & live)
        tl.store(scales + at // KV_BLOCK + g, each, (g < DIM // KV_BLOCK) & live)
        kept = dequantize_kv(codes, each, 1, SIZE)
    return kept


@triton.jit
def load_kv(
    numbers, scales, slot, live, DIM: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, PAST_L1: tl.constexpr
):  # fmt: skip
    """[ROWS, SIZE] of the KV head that the pointers point to, as attention reads them; zeros where `live` [ROWS] is
    not. slot: int64 [ROWS], in numbers. PAST_L1: it may hold older content."""
    cache: tl.constexpr = ".cg" if PAST_L1 else ""
    d = tl.arange(0, SIZE)[None, :]
    x = tl.load(numbers + slot[:, None] + d, live[:, None] & (d < DIM), 0, cache_modifier=cache)
    if scales is not None:
        g = tl.arange(0, SIZE // KV_BLOCK)[None, :]
        there = live[:, None] & (g < DIM // KV_BLOCK)
        each = tl.load(scales + (slot // KV_BLOCK)[:, None] + g, there, 0.0, cache_modifier=cache)
        x = dequantize_kv(x, each, ROWS, SIZE)
    return x
