"""Unpacks quantised matrices to rows of 16-bit floats, for products of thousands of tokens, which use each weight
hundreds of times. The tensor cores then never wait for unpacking.

8,192 tokens, 128 experts of 768 x 2,048 in Q4_K on an H200: gate and up 1.10 ms including 0.32 of unpacking, where
unpacking within the product takes 1.84; down 0.60 instead of 1.35.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005
# (Triton compiles no starred tuples.)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.linear.gemm import book_weights, field_weights, next_parts, row_pointers
from moeserve.kernels.linear.k_blocks import expert_planes


@kernel
def unpack_kernel(
    codes, scales, supers, out, used, first_expert,
    ROWS: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr, OUT_ROWS: tl.constexpr, EVERY: tl.constexpr,
    AT: tl.constexpr, BN: tl.constexpr, KB: tl.constexpr, USED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Unpacks row r of an expert's matrix to row r * EVERY + AT of out [experts, OUT_ROWS, COLS], rounded once,
    from float32. Grid (row tiles, iterations of KB K blocks, experts). With PDL the matrix is read and unpacked
    before the previous kernel has ended; that kernel must not write the matrix, but may still read `out`.

    used: int32 [USED], experts from `first_expert` on, or None: other experts' matrices are left out."""
    if PDL:
        gdc_launch_dependents()
    expert = tl.program_id(2).to(tl.int64)
    if used is not None:
        i = tl.arange(0, triton.next_power_of_2(USED))
        is_used = tl.load(used + i, i < USED, -1) == expert + first_expert
        if tl.sum(is_used.to(tl.int32), 0) == 0:
            return
    first = tl.program_id(1) * KB
    row = tl.minimum(tl.program_id(0) * BN + tl.arange(0, BN), ROWS - 1)
    to = out + (expert * OUT_ROWS + row * EVERY + AT)[:, None] * COLS
    codes, scales, supers = expert_planes(codes, scales, supers, expert, ROWS, COLS, F)
    octets = codes.to(tl.pointer_type(tl.uint8))
    at, live_bytes, words, live, d = row_pointers(octets, scales, supers, row, first, COLS, F, KB)
    low, high, word, min_word = at, at, words, words
    fields = ()
    for f in tl.static_range(8):
        if F.is_book:
            w = book_weights(octets, scales, supers, row, first, f, COLS, F, KB)
        else:
            low, high = next_parts(low, high, at, live_bytes, f, COLS, F)
            w, word, min_word = field_weights(low, high, word, min_word, words, d, live, f, F, KB, tl.float32)
        fields = fields + (w.to(out.dtype.element_ty),)
    if PDL:
        gdc_wait()
    b = tl.arange(0, KB * 16)
    for f in tl.static_range(8):
        k = (first + b // 16) * 128 + f * 16 + b % 16
        tl.store(to + k[None, :], fields[f], (k < COLS)[None, :])
