"""Multiplies up to eight tokens by a matrix of Q4_K or Q6_K on the tensor cores, with int8 activations.

A GEMV (gemv.py) multiplies each token separately: for eight tokens it takes three times as long as for two. Here one
instruction multiplies 16 rows of a matrix by eight tokens: 32 columns (Q4_K) or 16 (Q6_K) that share a scale, as
integers, of which the scales make floats. A lane's bytes of that instruction are four columns of a row, which planes
hold in one word: low nibbles of a field of 16 columns, high nibbles of the next one.

A program has 16 rows; its warps share their columns, 512 each, and add their sums at the end. Loads are of 16 bytes, so
that they touch few cache lines: a thread loads four words, of which it exchanges three within its quad. The weights are
loaded before the kernel waits for the one that computes the activations.

In Gluon, Triton's language with explicit layouts: a tensor has one element for each thread. It has no interpreter; the
specification is reference.py.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005
# (Triton compiles no starred tuples.)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import Kernel

# Products of unsigned bytes [16 rows, 32 or 16 columns] with signed ones [columns, 8 tokens]. Operands: sums of row g
# and tokens 2t, 2t + 1, of row g + 8 and these tokens; the rows' bytes, the tokens'. A lane is 4 g + t.
OF_32 = gl.constexpr(
    "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {0, 0, 0, 0};"
)
OF_16 = gl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {$0, $1, $2, $3}, {$4, $5}, {$6}, {0, 0, 0, 0};"
)
# The tokens' own sums, of 32 columns, of 16 times 32 (Q6_K's codes are 32 too large).
SUMS_OF_32 = gl.constexpr(
    """{ .reg .b32 a, b, one; mov.b32 one, 0x01010101;
    mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {$0, $1, a, b}, {one, one, one, one}, {$2, $3}, {0, 0, 0, 0}; }"""
)
OFFSETS_OF_16 = gl.constexpr(
    """{ .reg .b32 a, b, c; mov.b32 c, 0x20202020;
    mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {$0, $1, a, b}, {c, c}, {$2}, {0, 0, 0, 0}; }"""
)

# Operands: four words for each of a quad's threads, transposed: word t of each thread's; those words; t.
TRANSPOSE = gl.constexpr(
    """{ .reg .pred p, q; .reg .b32 a, b, c, d, m, n, bit;
    and.b32 bit, $8, 1; setp.ne.b32 p, bit, 0; and.b32 bit, $8, 2; setp.ne.b32 q, bit, 0;
    selp.b32 m, $4, $5, p; selp.b32 n, $6, $7, p;
    shfl.sync.bfly.b32 m, m, 1, 0x1f, 0xffffffff; shfl.sync.bfly.b32 n, n, 1, 0x1f, 0xffffffff;
    selp.b32 a, m, $4, p; selp.b32 b, $5, m, p; selp.b32 c, n, $6, p; selp.b32 d, $7, n, p;
    selp.b32 m, a, c, q; selp.b32 n, b, d, q;
    shfl.sync.bfly.b32 m, m, 2, 0x1f, 0xffffffff; shfl.sync.bfly.b32 n, n, 2, 0x1f, 0xffffffff;
    selp.b32 $0, m, a, q; selp.b32 $2, c, m, q; selp.b32 $1, n, b, q; selp.b32 $3, d, n, q; }"""
)


@gluon.jit
def low_half(word):
    return (word & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def high_half(word):
    return ((word >> 16) & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def products_of_32(a, b, c, d, x, y):
    return gl.inline_asm_elementwise(
        OF_32,
        "=r,=r,=r,=r,r,r,r,r,r,r",
        [a, b, c, d, x, y],
        (gl.int32, gl.int32, gl.int32, gl.int32),
        True,
        1,
    )


@gluon.jit
def products_of_16(a, b, x):
    return gl.inline_asm_elementwise(
        OF_16, "=r,=r,=r,=r,r,r,r", [a, b, x], (gl.int32, gl.int32, gl.int32, gl.int32), True, 1
    )


@gluon.jit
def four_bit_scales(word, min_word, d, p: gl.constexpr):
    """Returns scale and min of a K block's group p. d: the word of d and dmin."""
    scale = low_half(d) * ((word >> (8 * p)) & 255).to(gl.float32)
    return scale, high_half(d) * ((min_word >> (8 * p)) & 255).to(gl.float32)


@gluon.jit
def six_bit_scales(word, d, odd: gl.constexpr):
    """Returns the scales of a part's two fields."""
    scale = low_half(d) * ((word << (24 - 16 * odd)) >> 24).to(gl.float32)
    return scale, low_half(d) * ((word << (16 - 16 * odd)) >> 24).to(gl.float32)


@gluon.jit
def add_four_bits(acc, w, v, factors, factors8, x, y, xs, xs1):
    """Adds the products of a part of a K block. w, v: words of rows g and g + 8; factors: their scales and mins; x, y:
    words of token g; xs, xs1: scales of tokens 2t and 2t + 1."""
    a, b, c, e = products_of_32(
        w & 0x0F0F0F0F, v & 0x0F0F0F0F, (w >> 4) & 0x0F0F0F0F, (v >> 4) & 0x0F0F0F0F, x, y
    )
    u, u1 = gl.inline_asm_elementwise(SUMS_OF_32, "=r,=r,r,r", [x, y], (gl.int32, gl.int32), True, 1)
    u, u1 = u.to(gl.float32), u1.to(gl.float32)
    return (
        acc[0] + xs * (factors[0] * a.to(gl.float32) - factors[1] * u),
        acc[1] + xs1 * (factors[0] * b.to(gl.float32) - factors[1] * u1),
        acc[2] + xs * (factors8[0] * c.to(gl.float32) - factors8[1] * u),
        acc[3] + xs1 * (factors8[0] * e.to(gl.float32) - factors8[1] * u1),
    )


@gluon.jit
def add_six_bits(acc, w, v, scale, scale8, x, xs, xs1):
    """Adds the products of a field of 16 columns. w, v: codes of rows g and g + 8."""
    a, b, c, e = products_of_16(w, v, x)
    u, u1 = gl.inline_asm_elementwise(OFFSETS_OF_16, "=r,=r,r", [x], (gl.int32, gl.int32), True, 1)
    return (
        acc[0] + xs * scale * (a - u).to(gl.float32),
        acc[1] + xs1 * scale * (b - u1).to(gl.float32),
        acc[2] + xs * scale8 * (c - u).to(gl.float32),
        acc[3] + xs1 * scale8 * (e - u1).to(gl.float32),
    )


@gluon.jit
def six_bits(low, high, FIRST: gl.constexpr, HIGH: gl.constexpr):
    """Returns four codes: nibbles from bit FIRST on of a word's bytes, with two bits from bit HIGH on."""
    return ((low >> FIRST) & 0x0F0F0F0F) | (((high >> HIGH) & 0x03030303) << 4)


@gluon.jit
def add_six_bit_part(acc, words, bits, scales, scales8, x, y, xs, xs1, odd: gl.constexpr):
    """Adds the products of a part's two fields. words, bits: low and high bits of rows g and g + 8. odd: whether the
    part's number is."""
    w, v = six_bits(words[0], bits[0], 0, 4 * odd), six_bits(words[1], bits[1], 0, 4 * odd)
    acc = add_six_bits(acc, w, v, scales[0], scales8[0], x, xs, xs1)
    w, v = six_bits(words[0], bits[0], 4, 4 * odd + 2), six_bits(words[1], bits[1], 4, 4 * odd + 2)
    return add_six_bits(acc, w, v, scales[1], scales8[1], y, xs, xs1)


@gluon.jit
def four_at_once(pointer, layout: gl.constexpr):
    """Loads four numbers from each of `pointer` [threads], whose layout is a slice of `layout` [threads, 4]."""
    four = gl.load(pointer[:, None] + gl.arange(0, 4, layout=gl.SliceLayout(0, layout))[None, :])
    a, b = gl.split(gl.permute(gl.reshape(four, [four.shape[0], 2, 2]), [0, 2, 1]))
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [layout.warps_per_cta[0]], [0])
    first, second = gl.split(a)
    third, fourth = gl.split(b)
    return (
        gl.convert_layout(first, flat, assert_trivial=True), gl.convert_layout(second, flat, assert_trivial=True),
        gl.convert_layout(third, flat, assert_trivial=True), gl.convert_layout(fourth, flat, assert_trivial=True),
    )  # fmt: skip


@gluon.jit
def words_at_once(pointer, t, layout: gl.constexpr):
    """Loads four int32 from each of `pointer` [threads]; returns, to thread t of a quad, word t of what each of its
    threads loaded. layout: as for `four_at_once`."""
    a, b, c, d = four_at_once(pointer, layout)
    return gl.inline_asm_elementwise(
        TRANSPOSE,
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [a, b, c, d, t],
        (gl.int32, gl.int32, gl.int32, gl.int32),
        True,
        1,
    )


@gluon.constexpr_function
def one_each(warps):
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.constexpr_function
def four_each(warps):
    return gl.BlockedLayout([1, 4], [32, 1], [warps, 1], [1, 0])


@gluon.jit
def load_weights(
    codes, scales, supers, tile, ROWS: gl.constexpr, COLS: gl.constexpr, IS_SIX: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Loads a warp's four K blocks of rows tile * 16 + g and tile * 16 + g + 8. Returns four pairs, for these two rows:
    words of low bits, by part and K block; of high bits (Q6_K), likewise; of scales, two K blocks' four at a time; of
    d, by two K blocks."""
    pairs: gl.constexpr = four_each(WARPS)
    K_BLOCKS: gl.constexpr = COLS // 128
    PARTS: gl.constexpr = 6 if IS_SIX else 4
    thread = gl.arange(0, 32 * WARPS, layout=one_each(WARPS))
    t = thread % 4
    loading = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, pairs))
    warp, g, k = loading // 32, loading % 32 // 4, loading % 4
    row, row8 = gl.minimum(tile * 16 + g, ROWS - 1), gl.minimum(tile * 16 + g + 8, ROWS - 1)
    at = codes + (row * PARTS * K_BLOCKS + warp * 4 + k) * 4
    at8 = codes + (row8 * PARTS * K_BLOCKS + warp * 4 + k) * 4
    low, low8, high, high8 = (), (), (), ()
    for part in gl.static_range(4):
        low = low + (words_at_once(at + part * (K_BLOCKS * 4), t, pairs),)
        low8 = low8 + (words_at_once(at8 + part * (K_BLOCKS * 4), t, pairs),)
    if IS_SIX:
        for part in gl.static_range(4, 6):
            high = high + (words_at_once(at + part * (K_BLOCKS * 4), t, pairs),)
            high8 = high8 + (words_at_once(at8 + part * (K_BLOCKS * 4), t, pairs),)
    to, to8 = scales + (row * K_BLOCKS + warp * 4) * 2, scales + (row8 * K_BLOCKS + warp * 4) * 2
    factors = (four_at_once(to, pairs), four_at_once(to + 4, pairs))
    factors8 = (four_at_once(to8, pairs), four_at_once(to8 + 4, pairs))
    own = thread // 32 * 2
    of_row = gl.minimum(tile * 16 + thread % 32 // 4, ROWS - 1) * (K_BLOCKS // 2) + own
    of_row8 = gl.minimum(tile * 16 + thread % 32 // 4 + 8, ROWS - 1) * (K_BLOCKS // 2) + own
    d = (gl.load(supers + of_row), gl.load(supers + of_row + 1))
    d8 = (gl.load(supers + of_row8), gl.load(supers + of_row8 + 1))
    return (low, low8), (high, high8), (factors, factors8), (d, d8)


@gluon.jit
def load_tokens(
    x_codes, x_scales, COLS: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """Waits for the kernel that computes the activations, and loads a warp's four K blocks of them. Returns words of
    token g, of each part's first and second field of columns, and scales of tokens 2t and 2t + 1, all by K block and
    part."""
    pairs: gl.constexpr = four_each(WARPS)
    loading = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, pairs))
    warp, g, t = loading // 32, loading % 32 // 4, loading % 4
    token = gl.minimum(g, TOKENS - 1)
    at = x_scales + gl.minimum(t * 2, TOKENS - 1) * (COLS // 32) + warp * 16
    at1 = x_scales + gl.minimum(t * 2 + 1, TOKENS - 1) * (COLS // 32) + warp * 16
    if PDL:
        gdc_wait()
    from_x = x_codes + token * (COLS // 4) + warp * 128 + t * 8
    t = gl.arange(0, 32 * WARPS, layout=one_each(WARPS)) % 4
    x, y, xs, xs1 = (), (), (), ()
    for i in gl.static_range(4):
        x = x + (words_at_once(from_x + i * 32, t, pairs),)
        y = y + (words_at_once(from_x + i * 32 + 4, t, pairs),)
        xs = xs + (four_at_once(at + i * 4, pairs),)
        xs1 = xs1 + (four_at_once(at1 + i * 4, pairs),)
    return x, y, xs, xs1


@gluon.jit
def multiply_columns(low, high, factors, d, tokens, IS_SIX: gl.constexpr, WARPS: gl.constexpr):
    """Returns a warp's sums: of row g and tokens 2t, 2t + 1, of row g + 8 and these. low, high, factors, d: from
    `load_weights`; tokens: from `load_tokens`."""
    x, y, xs, xs1 = tokens
    zero = gl.zeros([32 * WARPS], gl.float32, layout=one_each(WARPS))
    acc = (zero, zero, zero, zero)
    for i in gl.static_range(4):
        for part in gl.static_range(4):
            if IS_SIX:
                acc = add_six_bit_part(
                    acc, (low[0][part][i], low[1][part][i]), (high[0][part // 2][i], high[1][part // 2][i]),
                    six_bit_scales(factors[0][i // 2][i % 2 * 2 + part // 2], d[0][i // 2], part % 2),
                    six_bit_scales(factors[1][i // 2][i % 2 * 2 + part // 2], d[1][i // 2], part % 2),
                    x[i][part], y[i][part], xs[i][part], xs1[i][part], part % 2,
                )  # fmt: skip
            else:
                acc = add_four_bits(
                    acc, low[0][part][i], low[1][part][i],
                    four_bit_scales(
                        factors[0][i // 2][i % 2 * 2], factors[0][i // 2][i % 2 * 2 + 1], d[0][i // 2], part
                    ),
                    four_bit_scales(
                        factors[1][i // 2][i % 2 * 2], factors[1][i // 2][i % 2 * 2 + 1], d[1][i // 2], part
                    ),
                    x[i][part], y[i][part], xs[i][part], xs1[i][part],
                )  # fmt: skip
    return acc


@gluon.jit
def store_sums(acc, out, tile, end, ROWS: gl.constexpr, STRIDE: gl.constexpr, WARPS: gl.constexpr):
    """Adds the warps' sums (`multiply_columns`) and stores those of tokens below `end`."""
    a, b = gl.join(acc[0], acc[1]), gl.join(acc[2], acc[3])
    sums = gl.sum(gl.reshape(gl.join(a, b), [WARPS, 32, 2, 2]), 0)
    layout: gl.constexpr = one_each(WARPS)
    a, b = gl.split(sums)
    lane = gl.arange(0, 32, layout=layout)
    row, t = tile * 16 + lane // 4, lane % 4
    y00, y01 = gl.split(a)
    y10, y11 = gl.split(b)
    store_sum(out, y00, row, 2 * t, end, ROWS, STRIDE, layout)
    store_sum(out, y01, row, 2 * t + 1, end, ROWS, STRIDE, layout)
    store_sum(out, y10, row + 8, 2 * t, end, ROWS, STRIDE, layout)
    store_sum(out, y11, row + 8, 2 * t + 1, end, ROWS, STRIDE, layout)


@gluon.jit
def store_sum(out, y, row, token, end, ROWS: gl.constexpr, STRIDE: gl.constexpr, layout: gl.constexpr):
    y = gl.convert_layout(y, layout)
    gl.store(out + token * STRIDE + row, y.to(out.dtype.element_ty), (row < ROWS) & (token < end))


@gluon.jit
def multiply_tile(
    x_codes, x_scales, codes, scales, supers, out, tile, end,
    ROWS: gl.constexpr, COLS: gl.constexpr, STRIDE: gl.constexpr, IS_SIX: gl.constexpr, TOKENS: gl.constexpr,
    WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Stores the products of rows tile * 16 .. of the matrix [ROWS, COLS] with tokens below `end` in `out`, rows STRIDE
    apart."""
    low, high, factors, d = load_weights(codes, scales, supers, tile, ROWS, COLS, IS_SIX, WARPS)
    tokens = load_tokens(x_codes, x_scales, COLS, TOKENS, WARPS, PDL)
    acc = multiply_columns(low, high, factors, d, tokens, IS_SIX, WARPS)
    store_sums(acc, out, tile, end, ROWS, STRIDE, WARPS)


@gluon.jit
def few_rows_kernel(
    x_codes, x_scales, codes, scales, supers, count, out, second_codes, second_scales, second_supers,
    ROWS: gl.constexpr, COLS: gl.constexpr, IS_SIX: gl.constexpr, SECOND_ROWS: gl.constexpr,
    SECOND_IS_SIX: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Computes out[i] = W x[i], [.., ROWS + SECOND_ROWS], for the first count[0] of TOKENS rows; an optional second
    matrix gives the last columns. The matrices and the count are read before the previous kernel has ended: it must not
    write them. Grid (tiles of 16 rows of W, then of the second matrix), of WARPS warps. IS_SIX: of Q6_K, else of Q4_K.
    COLS: 512 * WARPS."""
    if PDL:
        gdc_launch_dependents()
    tile = gl.program_id(0)
    end = gl.load(count)
    TILES: gl.constexpr = (ROWS + 15) // 16
    STRIDE: gl.constexpr = ROWS + SECOND_ROWS
    if tile < TILES:
        multiply_tile(
            x_codes,
            x_scales,
            codes,
            scales,
            supers,
            out,
            tile,
            end,
            ROWS,
            COLS,
            STRIDE,
            IS_SIX,
            TOKENS,
            WARPS,
            PDL,
        )
    elif SECOND_ROWS > 0:
        multiply_tile(
            x_codes, x_scales, second_codes, second_scales, second_supers, out + ROWS, tile - TILES, end, SECOND_ROWS,
            COLS, STRIDE, SECOND_IS_SIX, TOKENS, WARPS, PDL,
        )  # fmt: skip


few_rows = Kernel(few_rows_kernel)
