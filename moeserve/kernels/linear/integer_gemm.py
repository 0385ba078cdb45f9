"""Some tokens per expert times matrices of Q4_K, with weights as integers in float16, on the tensor cores.

A weight is d * (scale * code) - dmin * min. d and dmin belong to its super-block of 256 columns, scale and min to its
group of 32. scale * code is an integer that float16 holds exactly. It comes from two instructions for two weights: a
bitwise operation turns two codes of a word into 1024 + code, then one multiplication and addition gives scale *
(1024 + code) - scale * 1024. A super-block's products are multiplied by d once for all its columns, and mins are one
product more, with the sums of the activations by group. So a weight takes half of the instructions of
sliced_k_gemm.py.

Activations come in float16, in the order of integer_order.py, by which a lane's codes are whole pieces of 16 bytes and
belong to one group.

In Gluon, Triton's language with explicit layouts; it has no interpreter. The specification is experts/reference.py.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import Kernel
from moeserve.kernels.linear.integer_copies import copy_stage, count_blocks, pointers_of, routes_of
from moeserve.kernels.linear.integer_layouts import (
    axis,
    by_part,
    code_layout,
    code_memory,
    mma_layout,
    powers,
    row_layout,
    token_copies,
    token_layout,
    token_memory,
)

# Operands: eight float16 of a word's four bytes (first the low nibbles of bytes 0 and 2, 1 and 3, then the high ones);
# the word; pairs of scale, scale * -1024, scale / 16, scale * -64.
NIBBLES = gl.constexpr(
    """{ .reg .b32 a, b, w;
    lop3.b32 a, $8, 0x000F000F, 0x64006400, 0xEA; fma.rn.f16x2 a, a, $9, $10; mov.b32 {$0, $1}, a;
    lop3.b32 b, $8, 0x00F000F0, 0x64006400, 0xEA; fma.rn.f16x2 b, b, $11, $12; mov.b32 {$4, $5}, b;
    shr.u32 w, $8, 8;
    lop3.b32 a, w, 0x000F000F, 0x64006400, 0xEA; fma.rn.f16x2 a, a, $9, $10; mov.b32 {$2, $3}, a;
    lop3.b32 b, w, 0x00F000F0, 0x64006400, 0xEA; fma.rn.f16x2 b, b, $11, $12; mov.b32 {$6, $7}, b; }"""
)
# Operands: the four pairs above; the word of four scales; a selector of one of its bytes, twice, each below 0x64.
SCALES = gl.constexpr(
    """{ .reg .b32 s, least, sixteenth, high; mov.b32 least, 0xE400E400;
    mov.b32 sixteenth, 0x2C002C00; mov.b32 high, 0xD400D400;
    prmt.b32 s, $4, $5, $6; prmt.b32 s, s, 0x64646464, 0x4040; add.rn.f16x2 s, s, least; mov.b32 $0, s;
    mul.rn.f16x2 $1, s, least; mul.rn.f16x2 $2, s, sixteenth; mul.rn.f16x2 $3, s, high; }"""
)
# Operands: two float16; two words of four bytes; a selector of two of these bytes, for bytes 0 and 2.
MINS = gl.constexpr(
    """{ .reg .b32 m, least; mov.b32 least, 0xE400E400;
    prmt.b32 m, $2, $3, $4; lop3.b32 m, m, 0x00FF00FF, 0x64006400, 0xEA; add.rn.f16x2 m, m, least;
    mov.b32 {$0, $1}, m; }"""
)


@gluon.jit
def scale_pairs(word, next_word, selector):
    """Returns the pairs that NIBBLES takes, [rows, 4 parts], of two K blocks' words and a selector of one byte."""
    return gl.inline_asm_elementwise(
        SCALES,
        "=&r,=&r,=&r,=&r,r,r,r",
        [word, next_word, selector],
        (gl.int32, gl.int32, gl.int32, gl.int32),
        True,
        1,
    )


@gluon.jit
def of_part(first, second, layout: gl.constexpr):
    """Joins [rows, 4] of two K blocks to [rows, 4 parts, 2 K blocks, 1], for words of `layout`."""
    both = gl.convert_layout(gl.join(first, second), gl.SliceLayout(3, layout), assert_trivial=True)
    return both[:, :, :, None]


@gluon.jit
def integers(words, pairs, next_pairs, layout: gl.constexpr):
    """Returns scale * code as float16 [rows, 256], columns as products take them. words [rows, 4 parts, 2 K blocks, 4]
    in `layout`; the pairs: of both K blocks' scales."""
    w0, w1, w2, w3, w4, w5, w6, w7 = gl.inline_asm_elementwise(
        NIBBLES, "=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r,r,r,r,r",
        [
            words, of_part(pairs[0], next_pairs[0], layout), of_part(pairs[1], next_pairs[1], layout),
            of_part(pairs[2], next_pairs[2], layout), of_part(pairs[3], next_pairs[3], layout),
        ],
        (gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16), True, 1,
    )  # fmt: skip
    low = gl.join(gl.join(w0, w1), gl.join(w2, w3))
    high = gl.join(gl.join(w4, w5), gl.join(w6, w7))
    w = gl.join(low, high)  # rows, parts, K blocks, words, halves of a pair, pairs, nibbles
    return gl.reshape(gl.permute(w, [0, 2, 3, 6, 5, 1, 4]), [words.shape[0], 256])


@gluon.jit
def low_half(word):
    return (word & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def high_half(word):
    return ((word >> 16) & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def mins_twice(word, next_word, part):
    """Returns float16 [rows, 16]: the eight mins of two words, for sums and for what rounding left of them. part
    [1, 4]: 0 .. 3."""
    rows: gl.constexpr = word.shape[0]
    selector = part * 2 + (part * 2 + 1) * 0x100
    even, odd = gl.inline_asm_elementwise(
        MINS, "=&h,=&h,r,r,r", [word, next_word, selector], (gl.float16, gl.float16), True, 1
    )
    m = gl.reshape(gl.join(even, odd), [rows, 8])
    return gl.reshape(gl.permute(gl.join(m, m), [0, 2, 1]), [rows, 16])


@gluon.jit
def by_super_block(words, BLOCKS: gl.constexpr):
    """Takes [rows, n * BLOCKS] apart: four tensors [rows, n], of which BLOCKS count."""
    n: gl.constexpr = words.shape[1] // BLOCKS
    rows: gl.constexpr = words.shape[0]
    if BLOCKS == 1:
        a, b, c, d = words, words, words, words
    elif BLOCKS == 2:
        a, b = gl.split(gl.permute(gl.reshape(words, [rows, 2, n]), [0, 2, 1]))
        c, d = a, b
    else:
        ab, cd = gl.split(gl.permute(gl.reshape(words, [rows, 2, 2 * n]), [0, 2, 1]))
        a, b = gl.split(gl.permute(gl.reshape(ab, [rows, 2, n]), [0, 2, 1]))
        c, d = gl.split(gl.permute(gl.reshape(cd, [rows, 2, n]), [0, 2, 1]))
    return a, b, c, d


@gluon.jit
def codes_by_super_block(words, BLOCKS: gl.constexpr):
    """Takes words of codes [rows, parts, 2 * BLOCKS, 4] apart, likewise."""
    rows: gl.constexpr = words.shape[0]
    parts: gl.constexpr = words.shape[1]
    if BLOCKS == 1:
        a, b, c, d = words, words, words, words
    elif BLOCKS == 2:
        a, b = gl.split(gl.permute(gl.reshape(words, [rows, parts, 2, 2, 4]), [0, 1, 3, 4, 2]))
        c, d = a, b
    else:
        ab, cd = gl.split(gl.permute(gl.reshape(words, [rows, parts, 2, 4, 4]), [0, 1, 3, 4, 2]))
        a, b = gl.split(gl.permute(gl.reshape(ab, [rows, parts, 2, 2, 4]), [0, 1, 3, 4, 2]))
        c, d = gl.split(gl.permute(gl.reshape(cd, [rows, parts, 2, 2, 4]), [0, 1, 3, 4, 2]))
    return a, b, c, d


@gluon.jit
def add_super_block(acc, words, scales, d, x_smem, sum_smem, WARPS: gl.constexpr):
    """Adds the products of a super-block of 256 columns to acc [rows, tokens]. words [rows, 4, 2, 4] of codes, scales
    [rows, 4] and d [rows, 1]; x_smem [tokens, 256]; sum_smem [tokens, 16]."""
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    mma: gl.constexpr = mma_layout(WARPS)
    of_a: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    of_b: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    parts: gl.constexpr = by_part(ROWS, WARPS)
    row: gl.constexpr = gl.SliceLayout(1, parts)
    scale_words, min_words = gl.split(gl.reshape(scales, [ROWS, 2, 2]))
    s0, s1 = gl.split(scale_words)  # of the first K block, of the second
    m0, m1 = gl.split(min_words)
    s0 = gl.convert_layout(s0, row, assert_trivial=True)[:, None]
    s1 = gl.convert_layout(s1, row, assert_trivial=True)[:, None]
    m0 = gl.convert_layout(m0, row, assert_trivial=True)[:, None]
    m1 = gl.convert_layout(m1, row, assert_trivial=True)[:, None]
    part = gl.arange(0, 4, layout=gl.SliceLayout(0, parts))[None, :]
    odd = part % 2  # what odd parts read as the first K block is the second
    layout: gl.constexpr = code_layout(ROWS, WARPS, 2)
    words = gl.convert_layout(words, layout, assert_trivial=True)
    a = integers(
        words, scale_pairs(s0, s1, part + odd * 4), scale_pairs(s0, s1, part + (1 - odd) * 4), layout
    )
    b = gl.reshape(x_smem.load(token_layout(TOKENS, WARPS)), [TOKENS, 2, 4, 4, 2, 2, 2])
    b = gl.reshape(gl.permute(b, [1, 2, 4, 5, 3, 6, 0]), [256, TOKENS])
    zeros = gl.zeros([ROWS, TOKENS], gl.float32, layout=mma)
    a = gl.convert_layout(a, of_a, assert_trivial=True)
    total = mma_v2(a, gl.convert_layout(b, of_b, assert_trivial=True), zeros)
    m = gl.convert_layout(mins_twice(m0, m1, part), of_a, assert_trivial=True)
    least = mma_v2(m, sum_smem.permute((1, 0)).load(of_b), zeros)
    d = gl.convert_layout(gl.reshape(d, [ROWS]), gl.SliceLayout(1, mma), assert_trivial=True)[:, None]
    return acc + low_half(d) * total - high_half(d) * least


@gluon.jit
def add_stage(
    acc, code_smem, scale_smem, super_smem, x_smem, sum_smem, stage,
    WARPS: gl.constexpr, BLOCKS: gl.constexpr, COUNT: gl.constexpr,
):  # fmt: skip
    """Adds the products of a stage's first COUNT super-blocks."""
    ROWS: gl.constexpr = acc.shape[0]
    turned = code_smem.index(stage)._reinterpret(
        gl.int32, [ROWS, 4, 2 * BLOCKS, 4], code_memory(ROWS, 2 * BLOCKS, True)
    )
    words = codes_by_super_block(turned.load(code_layout(ROWS, WARPS, 2 * BLOCKS)), BLOCKS)
    scales = by_super_block(scale_smem.index(stage).load(row_layout(ROWS, WARPS, 4 * BLOCKS)), BLOCKS)
    supers = by_super_block(super_smem.index(stage).load(row_layout(ROWS, WARPS, BLOCKS)), BLOCKS)
    for i in gl.static_range(COUNT):
        at = stage * BLOCKS + i
        acc = add_super_block(
            acc, words[i], scales[i], supers[i], x_smem.index(at), sum_smem.index(at), WARPS
        )
    return acc


@gluon.jit
def store_gated(acc, routes, out, first, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Writes silu(gate) * up, whose rows take turns in acc by eight, to rows `routes` of out [.., ROWS]."""
    R: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    y, z = gl.split(gl.permute(gl.reshape(acc, [R // 16, 2, 8, TOKENS]), [0, 2, 3, 1]))
    h = gl.reshape(y / (1.0 + gl.exp(-y)) * z, [R // 2, TOKENS])
    layout: gl.constexpr = gl.DistributedLinearLayout(
        axis(1, 2, [1]) + axis(0, 2, powers(8 * WARPS, R // 2)) + axis(1, 2, powers(8, TOKENS)),
        axis(1, 2, [2, 4]) + axis(0, 2, [1, 2, 4]), axis(0, 2, powers(8, 8 * WARPS)), [], [R // 2, TOKENS],
    )  # fmt: skip
    h = gl.convert_layout(h, layout, assert_trivial=True)
    routes = gl.convert_layout(routes, gl.SliceLayout(0, layout), assert_trivial=True)
    row = first + gl.arange(0, R // 2, layout=gl.SliceLayout(1, layout))
    to = out + gl.maximum(routes, 0).to(gl.int64)[None, :] * ROWS + row[:, None]
    gl.store(to, h.to(out.dtype.element_ty), (routes >= 0)[None, :] & (row < ROWS)[:, None])


@gluon.jit
def store_parts(
    acc, routes, out, first, ROWS: gl.constexpr, TOP_K: gl.constexpr, PARTS: gl.constexpr, WARPS: gl.constexpr
):
    """Writes acc to out [.., PARTS per token, ROWS], whose first TOP_K are a token's routes."""
    row = first + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, mma_layout(WARPS)))
    part = gl.maximum(routes, 0)
    part += part // TOP_K * (PARTS - TOP_K)
    to = out + part.to(gl.int64)[None, :] * ROWS + row[:, None]
    gl.store(to, acc.to(out.dtype.element_ty), (routes >= 0)[None, :] & (row < ROWS)[:, None])


@gluon.jit
def sum_pieces(acc, partials, counters, piece, SPLIT: gl.constexpr):
    """Leaves acc in partials. Returns whether the other pieces of this result have done so, and the sum, which does
    not depend on their order."""
    rows: gl.constexpr = acc.shape[0]
    tokens: gl.constexpr = acc.shape[1]
    row = gl.arange(0, rows, layout=gl.SliceLayout(1, acc.type.layout))
    token = gl.arange(0, tokens, layout=gl.SliceLayout(0, acc.type.layout))
    place = row[:, None] * tokens + token[None, :]
    at = partials + piece.to(gl.int64) * (rows * tokens)
    gl.store(at + place, acc)
    gl.thread_barrier()  # all threads must have written before the counter says so
    result = piece // SPLIT
    is_last = gl.atomic_add(counters + result, 1, sem="acq_rel") == SPLIT - 1
    if is_last:
        gl.store(counters + result, 0)
        at -= (piece % SPLIT).to(gl.int64) * (rows * tokens)
        acc = gl.load(at + place, cache_modifier=".cg")
        for i in gl.static_range(1, SPLIT):
            acc += gl.load(at + i * (rows * tokens) + place, cache_modifier=".cg")
    return is_last, acc


@gluon.jit
def integer_gemm_kernel(
    x, sums, factors, codes, scales, supers, up_codes, up_scales, up_supers, block_expert, block_routes, out,
    partials, counters,
    ROWS: gl.constexpr, COLS: gl.constexpr, TOP_K: gl.constexpr, PARTS: gl.constexpr, ROUTE_BLOCKS: gl.constexpr,
    SPLIT: gl.constexpr, R: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr, BLOCKS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """With a second matrix, `up`: writes silu(W x[route // TOP_K]) * (W_up x[route // TOP_K]) to row `route` of out
    [.., ROWS]; else W x[route] to out [.., PARTS per token, ROWS], whose first TOP_K are a token's routes. For blocks
    of TOKENS routes. codes int32. Grid: any number of programs, which take pieces of R rows in turn. SPLIT, which
    divides the super-blocks into whole steps: pieces that share a result's columns; the last of them sums what they
    leave in partials, float32 [pieces * R * TOKENS], with an int32 of counters per result, which it leaves at 0."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    IS_GATED: gl.constexpr = up_codes is not None
    PIECE: gl.constexpr = R // 2 if IS_GATED else R
    TILES: gl.constexpr = (ROWS + PIECE - 1) // PIECE
    OF_TOKEN: gl.constexpr = TOP_K if IS_GATED else 1
    SUPERS: gl.constexpr = COLS // 256
    OF_PIECE: gl.constexpr = SUPERS // SPLIT
    STEPS: gl.constexpr = (OF_PIECE + BLOCKS - 1) // BLOCKS
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    code_smem = gl.allocate_shared_memory(
        gl.int32, [2, R, 4, 2 * BLOCKS, 4], code_memory(R, 2 * BLOCKS, False)
    )
    scale_smem = gl.allocate_shared_memory(gl.int32, [2, R, 4 * BLOCKS], plain)
    super_smem = gl.allocate_shared_memory(gl.int32, [2, R, BLOCKS], plain)
    x_smem = gl.allocate_shared_memory(gl.float16, [2 * BLOCKS, TOKENS, 256], token_memory(TOKENS))
    sum_smem = gl.allocate_shared_memory(gl.float16, [2 * BLOCKS, TOKENS, 16], plain)
    x_layout: gl.constexpr = token_copies(TOKENS, WARPS, 256)
    sum_layout: gl.constexpr = token_copies(TOKENS, WARPS, 16)
    of_token: gl.constexpr = gl.SliceLayout(0, mma_layout(WARPS))

    pieces = count_blocks(block_expert, ROUTE_BLOCKS, WARPS) * (TILES * SPLIT)
    piece = gl.program_id(0)
    stage = 0
    if piece < pieces:
        block = piece // (TILES * SPLIT)
        expert = gl.load(block_expert + block).to(gl.int64)
        code_at, scale_at, super_at, x_at, sum_at, live, live_sums = pointers_of(
            x, sums, codes, scales, supers, up_codes, up_scales, up_supers, expert,
            routes_of(block_routes, block, x_layout), routes_of(block_routes, block, sum_layout),
            piece // SPLIT % TILES * PIECE, piece % SPLIT * OF_PIECE, ROWS, COLS, OF_TOKEN, R, TOKENS, WARPS, BLOCKS,
        )  # fmt: skip
        copy_stage(
            code_at, scale_at, super_at, x_at, sum_at, code_smem, scale_smem, super_smem, x_smem,
            sum_smem, live, live_sums, 0, 0, BLOCKS, COLS,
        )  # fmt: skip
        async_copy.commit_group()
        while piece < pieces:
            block = piece // (TILES * SPLIT)
            first = piece // SPLIT % TILES * PIECE
            next_piece = piece + gl.num_programs(0)
            # What the next piece's pointers need is read during this piece. Beyond the last: this one again.
            next_block = gl.where(next_piece < pieces, next_piece, piece) // (TILES * SPLIT)
            next_expert = gl.load(block_expert + next_block).to(gl.int64)
            next_x_routes = routes_of(block_routes, next_block, x_layout)
            next_sum_routes = routes_of(block_routes, next_block, sum_layout)
            routes = gl.load(block_routes + block * TOKENS + gl.arange(0, TOKENS, layout=of_token))
            factor = gl.load(factors + gl.maximum(routes, 0) // OF_TOKEN)
            acc = gl.zeros([R, TOKENS], gl.float32, layout=mma_layout(WARPS))
            for k in range(STEPS - 1):
                async_copy.wait_group(0)
                gl.thread_barrier()
                copy_stage(
                    code_at, scale_at, super_at, x_at, sum_at, code_smem, scale_smem, super_smem, x_smem, sum_smem,
                    live, live_sums, k + 1, stage ^ 1, BLOCKS, COLS,
                )  # fmt: skip
                async_copy.commit_group()
                acc = add_stage(
                    acc, code_smem, scale_smem, super_smem, x_smem, sum_smem, stage, WARPS, BLOCKS, BLOCKS
                )
                stage = stage ^ 1
            async_copy.wait_group(0)
            gl.thread_barrier()
            code_at, scale_at, super_at, x_at, sum_at, live, live_sums = pointers_of(
                x, sums, codes, scales, supers, up_codes, up_scales, up_supers, next_expert, next_x_routes,
                next_sum_routes, next_piece // SPLIT % TILES * PIECE, next_piece % SPLIT * OF_PIECE, ROWS, COLS,
                OF_TOKEN, R, TOKENS, WARPS, BLOCKS,
            )  # fmt: skip
            if next_piece < pieces:
                copy_stage(
                    code_at, scale_at, super_at, x_at, sum_at, code_smem, scale_smem, super_smem, x_smem, sum_smem,
                    live, live_sums, 0, stage ^ 1, BLOCKS, COLS,
                )  # fmt: skip
            async_copy.commit_group()
            acc = add_stage(
                acc, code_smem, scale_smem, super_smem, x_smem, sum_smem, stage, WARPS, BLOCKS,
                OF_PIECE - (STEPS - 1) * BLOCKS,
            )  # fmt: skip
            stage = stage ^ 1
            acc = acc * factor[None, :]
            if IS_GATED:
                store_gated(acc, routes, out, first, ROWS, WARPS)
            else:
                if SPLIT == 1:
                    store_parts(acc, routes, out, first, ROWS, TOP_K, PARTS, WARPS)
                else:
                    is_last, acc = sum_pieces(acc, partials, counters, piece, SPLIT)
                    if is_last:
                        store_parts(acc, routes, out, first, ROWS, TOP_K, PARTS, WARPS)
            piece = next_piece


integer_gemm = Kernel(integer_gemm_kernel)
