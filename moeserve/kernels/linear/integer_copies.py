"""What integer_gemm.py copies to shared memory: which blocks there are, pointers to a piece's first super-blocks, and
the copies of some of them.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from moeserve.kernels.linear.integer_layouts import (
    code_copies,
    power_of_two,
    row_copies,
    token_copies,
)


@gluon.jit
def count_blocks(block_expert, BLOCKS: gl.constexpr, WARPS: gl.constexpr):
    """Returns how many of BLOCKS blocks have an expert; these come first."""
    SIZE: gl.constexpr = power_of_two(BLOCKS, 32 * WARPS)
    layout: gl.constexpr = gl.BlockedLayout([SIZE // (32 * WARPS)], [32], [WARPS], [0])
    i = gl.arange(0, SIZE, layout=layout)
    return gl.sum((gl.load(block_expert + i, i < BLOCKS, -1) >= 0).to(gl.int32), 0)


@gluon.jit
def routes_of(block_routes, block, layout: gl.constexpr):
    TOKENS: gl.constexpr = layout.shape[0]
    return gl.load(block_routes + block * TOKENS + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout)))


@gluon.jit
def row_pointers(
    matrix,
    second,
    expert,
    first,
    layout: gl.constexpr,
    WORDS: gl.constexpr,
    ROWS: gl.constexpr,
    R: gl.constexpr,
):
    """Returns pointers [R] to rows `first` on of an expert's matrix, WORDS apart; with a second matrix eight of the
    first and eight of the second in turn. Rows beyond ROWS are the last."""
    r = gl.arange(0, R, layout=layout)
    at = matrix + expert * (ROWS * WORDS)
    if second is None:
        row = gl.minimum(first + r, ROWS - 1)
    else:
        row = gl.minimum(first + r // 16 * 8 + r % 8, ROWS - 1)
        at = gl.where(r % 16 < 8, at, second + expert * (ROWS * WORDS))
    return at + row * WORDS


@gluon.jit
def code_pointers(
    codes, up_codes, expert, first, COLS: gl.constexpr, ROWS: gl.constexpr, R: gl.constexpr, WARPS: gl.constexpr,
    BLOCKS: gl.constexpr,
):  # fmt: skip
    """Returns pointers [R, 4, 2 * BLOCKS, 4] to the rows' first words."""
    layout: gl.constexpr = code_copies(R, WARPS, 2 * BLOCKS)
    in_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    in_part: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    in_block: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout)))
    in_word: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    at = row_pointers(codes, up_codes, expert, first, in_row, COLS // 8, ROWS, R)[:, None, None, None]
    at = at + gl.arange(0, 4, layout=in_part)[None, :, None, None] * (COLS // 32)
    at = at + gl.arange(0, 2 * BLOCKS, layout=in_block)[None, None, :, None] * 4
    return at + gl.arange(0, 4, layout=in_word)[None, None, None, :]


@gluon.jit
def word_pointers(
    matrix, second, expert, first, COUNT: gl.constexpr, WORDS: gl.constexpr, ROWS: gl.constexpr, R: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Returns pointers [R, COUNT] to the first of a row's WORDS words."""
    layout: gl.constexpr = row_copies(R, WARPS, COUNT)
    at = row_pointers(matrix, second, expert, first, gl.SliceLayout(1, layout), WORDS, ROWS, R)
    return at[:, None] + gl.arange(0, COUNT, layout=gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def token_pointers(x, routes, ROW: gl.constexpr, TOP_K: gl.constexpr, layout: gl.constexpr):
    """Returns pointers [tokens, width] to the first columns of the routes' tokens, whose rows are ROW long, and which
    of the tokens exist."""
    token = (gl.maximum(routes, 0) // TOP_K).to(gl.int64)
    at = (x + token * ROW)[:, None] + gl.arange(0, layout.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    return at, (routes >= 0)[:, None]


@gluon.jit
def pointers_of(
    x, sums, codes, scales, supers, up_codes, up_scales, up_supers, expert, x_routes, sum_routes, first,
    super_block, ROWS: gl.constexpr, COLS: gl.constexpr, TOP_K: gl.constexpr, R: gl.constexpr, TOKENS: gl.constexpr,
    WARPS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Returns pointers to BLOCKS super-blocks, from `super_block` on: codes [R, 4, 2 * BLOCKS, 4] and scales
    [R, 4 * BLOCKS] int32, supers [R, BLOCKS], x [TOKENS, 256], sums [TOKENS, 16]; and which of x's and sums' tokens
    exist."""
    SUPERS: gl.constexpr = COLS // 256
    code_at = code_pointers(codes, up_codes, expert, first, COLS, ROWS, R, WARPS, BLOCKS)
    scale_at = word_pointers(scales, up_scales, expert, first, 4 * BLOCKS, SUPERS * 4, ROWS, R, WARPS)
    super_at = word_pointers(supers, up_supers, expert, first, BLOCKS, SUPERS, ROWS, R, WARPS)
    x_at, live = token_pointers(x, x_routes, COLS, TOP_K, token_copies(TOKENS, WARPS, 256))
    sum_at, live_sums = token_pointers(sums, sum_routes, SUPERS * 16, TOP_K, token_copies(TOKENS, WARPS, 16))
    code_at, scale_at, super_at = (
        code_at + super_block * 8,
        scale_at + super_block * 4,
        super_at + super_block,
    )
    return code_at, scale_at, super_at, x_at + super_block * 256, sum_at + super_block * 16, live, live_sums


@gluon.jit
def existing(pointers, DIM: gl.constexpr, first, END: gl.constexpr):
    """Which of `pointers`, from `first` on along dimension 1, or 2 of four, are below END."""
    layout: gl.constexpr = pointers.type.layout
    if DIM == 1:
        one: gl.constexpr = gl.SliceLayout(0, layout)
        mask = (first + gl.arange(0, pointers.shape[1], layout=one) < END)[None, :]
    else:
        two: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout)))
        mask = (first + gl.arange(0, pointers.shape[2], layout=two) < END)[None, None, :, None]
    return mask


@gluon.jit
def copy_stage(
    codes, scales, supers, x, sums, code_smem, scale_smem, super_smem, x_smem, sum_smem, live, live_sums, n, stage,
    BLOCKS: gl.constexpr, COLS: gl.constexpr,
):  # fmt: skip
    """Starts the copies of super-blocks n * BLOCKS on, BLOCKS of them; those beyond the last become zero."""
    SUPERS: gl.constexpr = COLS // 256
    if SUPERS % BLOCKS == 0:
        async_copy.async_copy_global_to_shared(code_smem.index(stage), codes + n * (8 * BLOCKS))
        async_copy.async_copy_global_to_shared(scale_smem.index(stage), scales + n * (4 * BLOCKS))
        async_copy.async_copy_global_to_shared(super_smem.index(stage), supers + n * BLOCKS)
    else:
        there = existing(codes, 2, n * (2 * BLOCKS), COLS // 128)
        async_copy.async_copy_global_to_shared(code_smem.index(stage), codes + n * (8 * BLOCKS), mask=there)
        there = existing(scales, 1, n * (4 * BLOCKS), COLS // 64)
        async_copy.async_copy_global_to_shared(scale_smem.index(stage), scales + n * (4 * BLOCKS), mask=there)
        there = existing(supers, 1, n * BLOCKS, SUPERS)
        async_copy.async_copy_global_to_shared(super_smem.index(stage), supers + n * BLOCKS, mask=there)
    for i in gl.static_range(BLOCKS):
        block = n * BLOCKS + i
        there = block < SUPERS
        async_copy.async_copy_global_to_shared(
            x_smem.index(stage * BLOCKS + i), x + block * 256, mask=live & there
        )
        async_copy.async_copy_global_to_shared(
            sum_smem.index(stage * BLOCKS + i), sums + block * 16, mask=live_sums & there
        )
