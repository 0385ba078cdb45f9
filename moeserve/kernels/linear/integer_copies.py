"""The copying warpgroup of integer_gemm.py: fetches the super-blocks of all pieces ahead of the multiplying warpgroups.

Codes come by the tensor memory accelerator (TMA), in boxes of 32 rows (Q4_K) or 64 (Q6_K); scales and activations,
whose rows are too short for it or lie apart, by each thread.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from moeserve.kernels.linear.integer_layouts import power_of_two, row_copies, token_copies


@gluon.jit
def count_blocks(block_expert, BLOCKS: gl.constexpr):
    """Returns, as int32, how many of the BLOCKS blocks of routes have an expert; these come first. block_expert: int32
    [BLOCKS], negative: none."""
    SIZE: gl.constexpr = power_of_two(BLOCKS, 128)
    layout: gl.constexpr = gl.BlockedLayout([SIZE // 128], [32], [4], [0])
    i = gl.arange(0, SIZE, layout=layout)
    return gl.sum((gl.load(block_expert + i, i < BLOCKS, -1) >= 0).to(gl.int32), 0)


@gluon.jit
def routes_of(block_routes, block, layout: gl.constexpr):
    TOKENS: gl.constexpr = layout.shape[0]
    return gl.load(block_routes + block * TOKENS + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout)))


@gluon.jit
def row_pointers(
    matrix, second, expert, first, layout: gl.constexpr, WORDS: gl.constexpr, ROWS: gl.constexpr
):  # fmt: skip
    """Returns pointers [64] to rows `first` on of an expert's matrix, WORDS apart; with a second matrix eight of the
    first and eight of the second in turn. Rows beyond ROWS point to the last row."""
    r = gl.arange(0, 64, layout=layout)
    at = matrix + expert * (ROWS * WORDS)
    if second is None:
        row = gl.minimum(first + r, ROWS - 1)
    else:
        row = gl.minimum(first + r // 16 * 8 + r % 8, ROWS - 1)
        at = gl.where(r % 16 < 8, at, second + expert * (ROWS * WORDS))
    return at + row * WORDS


@gluon.jit
def word_pointers(
    matrix, second, expert, first, COUNT: gl.constexpr, WORDS: gl.constexpr, ROWS: gl.constexpr
):  # fmt: skip
    """Returns pointers [64, COUNT] to the first of a row's WORDS words."""
    layout: gl.constexpr = row_copies(COUNT)
    at = row_pointers(matrix, second, expert, first, gl.SliceLayout(1, layout), WORDS, ROWS)
    return at[:, None] + gl.arange(0, COUNT, layout=gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def token_pointers(x, routes, ROW: gl.constexpr, TOP_K: gl.constexpr, layout: gl.constexpr):
    """Returns pointers [tokens, width] to the first columns of the routes' tokens, whose rows are ROW long, and which
    of the tokens exist."""
    token = (gl.maximum(routes, 0) // TOP_K).to(gl.int64)
    at = (x + token * ROW)[:, None] + gl.arange(0, layout.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    return at, (routes >= 0)[:, None]


@gluon.jit
def copy_words(smem, at, first, END: gl.constexpr):
    """Starts an asynchronous copy to `smem` of int32 words `first` .. of 64 rows; words from END on become zero. at:
    pointers [64, words per copy] to each row's first words."""
    COUNT: gl.constexpr = at.shape[1]
    if END % COUNT == 0:
        async_copy.async_copy_global_to_shared(smem, at + first)
    else:
        word = gl.arange(0, COUNT, layout=gl.SliceLayout(0, at.type.layout))
        async_copy.async_copy_global_to_shared(smem, at + first, mask=(first + word < END)[None, :])


@gluon.jit
def copy_ahead(
    x, sums, codes, high, scales, supers, up_codes, up_scales, up_supers, block_expert, block_routes, pieces,
    code_smem, high_smem, scale_smem, super_smem, x_smem, sum_smem, full, empty,
    ROWS: gl.constexpr, COLS: gl.constexpr, OF_TOKEN: gl.constexpr, SPLIT: gl.constexpr, TOKENS: gl.constexpr,
    BLOCKS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Runs the copying warpgroup: copies each piece's super-blocks (256 columns of weights, scales and activations) to
    shared memory, BLOCKS of them a stage, as stages become free. A stage's barrier `full` counts every thread, plus one
    for TMA's bytes. Other arguments as in `integer_gemm_kernel`."""
    OWN: gl.constexpr = 64 if up_codes is None else 32
    TILES: gl.constexpr = (ROWS + OWN * GROUPS - 1) // (OWN * GROUPS)
    SUPERS: gl.constexpr = COLS // 256
    OF_PIECE: gl.constexpr = SUPERS // SPLIT
    STEPS: gl.constexpr = (OF_PIECE + BLOCKS - 1) // BLOCKS
    x_layout: gl.constexpr = token_copies(TOKENS, 256)
    sum_layout: gl.constexpr = token_copies(TOKENS, 16)
    n = 0
    piece = gl.program_id(0)
    # The inputs of the next piece's pointers are read during this piece. Beyond the last: that one again.
    block = gl.minimum(piece, pieces - 1) // (TILES * SPLIT)
    expert = gl.load(block_expert + block).to(gl.int64)
    x_routes = routes_of(block_routes, block, x_layout)
    sum_routes = routes_of(block_routes, block, sum_layout)
    while piece < pieces:
        first = piece // SPLIT % TILES * (OWN * GROUPS)
        super_block = piece % SPLIT * OF_PIECE
        scale_at = word_pointers(scales, up_scales, expert, first, 4 * BLOCKS, SUPERS * 4, ROWS)
        super_at = word_pointers(supers, up_supers, expert, first, BLOCKS, SUPERS, ROWS)
        if GROUPS == 2:
            more_scales = word_pointers(scales, up_scales, expert, first + OWN, 4 * BLOCKS, SUPERS * 4, ROWS)
            more_supers = word_pointers(supers, up_supers, expert, first + OWN, BLOCKS, SUPERS, ROWS)
        x_at, live = token_pointers(x, x_routes, COLS, OF_TOKEN, x_layout)
        sum_at, live_sums = token_pointers(sums, sum_routes, SUPERS * 16, OF_TOKEN, sum_layout)
        row = (expert * ROWS + first).to(gl.int32) * 4
        piece += gl.num_programs(0)
        block = gl.minimum(piece, pieces - 1) // (TILES * SPLIT)
        expert = gl.load(block_expert + block).to(gl.int64)
        x_routes = routes_of(block_routes, block, x_layout)
        sum_routes = routes_of(block_routes, block, sum_layout)
        for k in range(STEPS):
            stage = n % STAGES
            at = full.index(stage)
            own = super_block + k * BLOCKS
            mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
            mbarrier.expect(at, GROUPS * (4 if high is None else 6) * 64 * 8 * BLOCKS * 4)
            for g in gl.static_range(GROUPS):
                box = 2 * (stage * GROUPS + g)
                if high is not None:
                    box = stage * GROUPS + g
                    own_row = row // 4 + g * 64
                    tma.async_copy_global_to_shared(codes, [own_row, 0, own * 8], at, code_smem.index(box))
                    tma.async_copy_global_to_shared(high, [own_row, 4, own * 8], at, high_smem.index(box))
                elif up_codes is None:
                    tma.async_copy_global_to_shared(codes, [row + g * 256, own * 8], at, code_smem.index(box))
                    tma.async_copy_global_to_shared(
                        codes, [row + g * 256 + 128, own * 8], at, code_smem.index(box + 1)
                    )
                else:
                    tma.async_copy_global_to_shared(codes, [row + g * 128, own * 8], at, code_smem.index(box))
                    tma.async_copy_global_to_shared(
                        up_codes, [row + g * 128, own * 8], at, code_smem.index(box + 1)
                    )
            copy_words(scale_smem.index(stage * GROUPS), scale_at, own * 4, SUPERS * 4)
            copy_words(super_smem.index(stage * GROUPS), super_at, own, SUPERS)
            if GROUPS == 2:
                copy_words(scale_smem.index(stage * GROUPS + 1), more_scales, own * 4, SUPERS * 4)
                copy_words(super_smem.index(stage * GROUPS + 1), more_supers, own, SUPERS)
            for i in gl.static_range(BLOCKS):
                is_there = own + i < SUPERS
                x_to = x_smem.index(stage * BLOCKS + i)
                async_copy.async_copy_global_to_shared(x_to, x_at + (own + i) * 256, mask=live & is_there)
                if sum_smem is not None:
                    sum_to = sum_smem.index(stage * BLOCKS + i)
                    async_copy.async_copy_global_to_shared(
                        sum_to, sum_at + (own + i) * 16, mask=live_sums & is_there
                    )
            async_copy.mbarrier_arrive(at, increment_count=False)
            n += 1
