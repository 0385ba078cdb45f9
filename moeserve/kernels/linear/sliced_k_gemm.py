"""Multiplies some tokens (8 to 64) by a quantised matrix, on the tensor cores.

As in gemm.py the weights are the left operand, but a batch of products [BN / RB, 16] x [16, BM] is computed at
once: one for each of KB K blocks and RB blocks of rows. A warp has its own K blocks, so that the columns of a
product share their scales. That allows two ways:

- Up to SCALED_AFTER tokens, the bare codes are multiplied, which bfloat16 holds exactly, and a group's sums are scaled:
  acc += s * (codes . x) - m * sum x. Scaling weights first would take three instructions per weight. Codes are
  multiplied as 128 + code, whose bits need no conversion, and sums start from -128 sum x: one more product, of 16 rows.
- With more tokens, the weights are scaled before the product.

Either way bytes go from shared memory into the tensor cores' layout unchanged and are unpacked there: Triton moves
the layout conversion to the load, because all that follows is elementwise, a reshape or a broadcast.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import COMPILED, kernel
from moeserve.kernels.linear.gated import gated
from moeserve.kernels.linear.gemm import (
    add_bias,
    add_gate_bias,
    field_codes,
    field_numbers,
    next_parts,
    part_rows,
    route_pointers,
    store_tile,
)
from moeserve.kernels.linear.k_blocks import expert_planes
from moeserve.kernels.linear.paired_weights import has_pairs, paired_weights, scale_and_negative_min
from moeserve.kernels.linear.sliced_k_activations import activation_pointers, load_activations, mma_dtype
from moeserve.kernels.planes.triton import scale_and_min
from moeserve.quantization import Scale

U8_MIN = tl.constexpr(int(Scale.U8_MIN))
SCALED_AFTER = tl.constexpr(16)  # tokens


@triton.jit
def k_blocks_first(tile, KB: tl.constexpr, RB: tl.constexpr):
    """Rearranges [rows, KB * 16] to [KB * RB, rows / RB, 16]."""
    tile = tl.permute(tl.reshape(tile, [tile.shape[0], KB, 16]), [1, 0, 2])
    return tl.reshape(tile, [KB * RB, tile.shape[1] // RB, 16])


@triton.constexpr_function
def offset_assembly(F):
    """Assembly: four bfloat16 of -(128 + F.offset) for four bytes."""
    return f"{{ and.b32 $0, $2, 0; or.b32 $0, $0, {(0xC300 + F.offset) * 0x10001:#x}; mov.b32 $1, $0; }}"


@triton.jit
def minus_offset_like(bytes, F: tl.constexpr, dtype: tl.constexpr):
    """Returns -(bias + offset) in the shape of `bytes`. It is computed from them, so that the compiler gives it the
    codes' layout and reads the activations of both products from shared memory once."""
    if COMPILED and dtype == tl.bfloat16:
        out = tl.inline_asm_elementwise(
            offset_assembly(F), "=r,=r,r", [bytes], tl.bfloat16, is_pure=True, pack=4
        )
    else:
        out = tl.full(bytes.shape, -(F.bias + F.offset), dtype)
    return out


@triton.jit
def code_pointers(codes, r, first, COLS: tl.constexpr, F: tl.constexpr, KB: tl.constexpr):
    """Returns pointers to the bytes of part 0 [BN, KB * 16] for rows r [BN] from K block `first` on, and a mask of the
    rows that exist. codes: uint8, the expert's first row."""
    K_BLOCKS: tl.constexpr = (COLS + 127) // 128
    b = tl.arange(0, KB * 16)
    at = codes + r[:, None] * (F.parts * K_BLOCKS * 16) + (first * 16 + b)[None, :]
    return at, (first + b // 16 < K_BLOCKS)[None, :]


@triton.jit
def halves(pair):
    """Returns both words of an int64. In assembly, because otherwise the compiler shifts all 64 bits for each byte
    needed."""
    if COMPILED:
        low, high = tl.inline_asm_elementwise(
            "mov.b64 {$0, $1}, $2;", "=r,=r,l", [pair], (tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        low, high = pair.to(tl.int32), (pair >> 32).to(tl.int32)
    return low, high


@triton.jit
def load_scales(scales, supers, r, first, COLS: tl.constexpr, F: tl.constexpr, KB: tl.constexpr):
    """Returns the scale words (a tuple) and the super-blocks' words, or without these the first scale word, for rows r
    [BN] and the KB K blocks from `first` on; each is [KB, BN]. Words are loaded in pairs, because the number of loads
    is what costs."""
    K_BLOCKS: tl.constexpr = (COLS + 127) // 128
    u = (first + tl.arange(0, KB))[None, :]
    there = u < K_BLOCKS
    words = ()
    if F.words == 1:
        words = (tl.trans(tl.load(scales + r[:, None] * K_BLOCKS + u, there, 0)),)
    else:
        at = scales.to(tl.pointer_type(tl.int64)) + (r[:, None] * K_BLOCKS + u) * (F.words // 2)
        for i in tl.static_range(F.words // 2):
            pair = tl.trans(tl.load(at + i, there, 0))
            words = words + halves(pair)
    d = words[0]
    if F.has_super:
        d = tl.trans(tl.load(supers + r[:, None] * ((COLS + 255) // 256) + u // 2, there, 0))
    return words, d


@triton.jit
def wide_as(total, BN: tl.constexpr):
    """Repeats [.., 16, BM] to [.., BN, BM]; no data moves between threads."""
    KB: tl.constexpr = total.shape[0]
    BM: tl.constexpr = total.shape[2]
    return tl.reshape(tl.broadcast_to(total[:, None, :, :], [KB, BN // 16, 16, BM]), [KB, BN, BM])


@triton.jit
def minus_offsets(bias_rows, a0, a1, like):
    """Returns -(bias + offset) * sum x [KB * RB, 16, BM], the same in all 16 rows. a1: None for a group of 16."""
    KB: tl.constexpr = like.shape[0]
    BM: tl.constexpr = like.shape[2]
    total = tl.dot(bias_rows, a0, tl.zeros([KB, 16, BM], tl.float32))
    if a1 is not None:
        total = tl.dot(bias_rows, a1, total)
    return total


@triton.jit
def add_group(acc, w0, w1, a0, a1, bias_rows, s, m, F: tl.constexpr):
    """Returns acc + s * codes . x - m * sum x, float32, for a group: of one field if w1 is None, else of two."""
    if F.is_signed:
        part = tl.zeros_like(acc)
    else:
        total = minus_offsets(bias_rows, a0, a1, acc)
        part = wide_as(total, acc.shape[1])
    part = tl.dot(w0, a0, part)
    if w1 is not None:
        part = tl.dot(w1, a1, part)
    acc += s[:, :, None] * part
    if F.has_own_min:
        acc -= m[:, :, None] * wide_as(total * (-1.0 / (F.bias + F.offset)), acc.shape[1])
    return acc


@triton.jit
def k_block_scales(words, d, g: tl.constexpr, F: tl.constexpr, RB: tl.constexpr, PAIRS: tl.constexpr):
    """Returns float32 s and m [KB * RB, BN / RB] of group g; PAIRS: as scale_and_negative_min does."""
    word, min_word = words[0], words[0]
    if F.scale == U8_MIN:
        min_word = words[1]
    else:
        word = words[g // F.groups_per_word]
        min_word = word
    if PAIRS:
        s, m = scale_and_negative_min(word, min_word, d, g, F)
    else:
        s, m = scale_and_min(word, min_word, d, g, F)
    rows: tl.constexpr = s.shape[1] // RB
    return tl.reshape(s, [s.shape[0] * RB, rows]), tl.reshape(m, [s.shape[0] * RB, rows])


@triton.jit
def add_pair(
    acc, low, high, at, live, words, d, bias_rows, a0, a1,
    h: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr, KB: tl.constexpr, RB: tl.constexpr,
):  # fmt: skip
    """Adds the products of fields 2h and 2h + 1 of the loaded K blocks to acc [KB * RB, BN / RB, BM]. a0, a1 [KB *
    RB, 16, BM]: activations. Returns acc, and the bytes that the next fields may need."""
    PAIRS: tl.constexpr = acc.shape[2] > SCALED_AFTER and has_pairs(F, a0.dtype)
    s0, m0 = k_block_scales(words, d, h * 32 // F.group, F, RB, PAIRS)
    s1, m1 = s0, m0
    if F.group == 16:
        s1, m1 = k_block_scales(words, d, h * 2 + 1, F, RB, PAIRS)
    low, high = next_parts(low, high, at, live, h * 2, COLS, F)
    if acc.shape[2] <= SCALED_AFTER:
        w0 = k_blocks_first(field_codes(low, high, h * 2, F, a0.dtype), KB, RB)
        low, high = next_parts(low, high, at, live, h * 2 + 1, COLS, F)
        w1 = k_blocks_first(field_codes(low, high, h * 2 + 1, F, a0.dtype), KB, RB)
        if F.group == 32:
            acc = add_group(acc, w0, w1, a0, a1, bias_rows, s0, m0, F)
        else:
            acc = add_group(acc, w0, None, a0, None, bias_rows, s0, m0, F)
            acc = add_group(acc, w1, None, a1, None, bias_rows, s1, m1, F)
    else:
        acc = tl.dot(scaled_field(low, high, s0, m0, h * 2, F, KB, RB, a0.dtype), a0, acc)
        low, high = next_parts(low, high, at, live, h * 2 + 1, COLS, F)
        acc = tl.dot(scaled_field(low, high, s1, m1, h * 2 + 1, F, KB, RB, a0.dtype), a1, acc)
    return acc, low, high


@triton.jit
def by_column(values, KB: tl.constexpr):
    """Expands [KB * RB, BN / RB] of groups to [BN, KB * 16] of columns, in the order of a field's code bytes."""
    rows: tl.constexpr = values.shape[0] * values.shape[1] // KB
    wide = tl.broadcast_to(tl.trans(tl.reshape(values, [KB, rows]))[:, :, None], [rows, KB, 16])
    return tl.reshape(wide, [rows, KB * 16])


@triton.jit
def scaled_field(
    low, high, s, m, f: tl.constexpr, F: tl.constexpr, KB: tl.constexpr, RB: tl.constexpr, dtype: tl.constexpr
):
    """Returns weights [KB * RB, BN / RB, 16] of field f in the float dtype."""
    if has_pairs(F, dtype):
        w = k_blocks_first(paired_weights(low, high, by_column(s, KB), by_column(m, KB), f, F), KB, RB)
    else:
        numbers = k_blocks_first(field_numbers(low, high, f, F), KB, RB)
        w = (numbers * (s * (1.0 / F.unit))[:, :, None] - (s * F.bias + m)[:, :, None]).to(dtype)
    return w


@triton.jit
def add_k_blocks(
    acc, up_acc, codes, scales, supers, up_codes, up_scales, up_supers, x, live_x, k, bias_rows, up_bias_rows, r,
    first, COLS: tl.constexpr, F: tl.constexpr, F_UP: tl.constexpr, KB: tl.constexpr, RB: tl.constexpr,
):  # fmt: skip
    """Adds the products of K blocks `first` .. + KB - 1 to acc [KB * RB, BN / RB, BM] and, unless F_UP is None, to
    up_acc. x, live_x, k: from activation_pointers; the planes' pointers point to the expert's first row."""
    at, live = code_pointers(codes, r, first, COLS, F, KB)
    words, d = load_scales(scales, supers, r, first, COLS, F, KB)
    low, high = at, at
    if F_UP is not None:
        up_at, up_live = code_pointers(up_codes, r, first, COLS, F_UP, KB)
        up_words, up_d = load_scales(up_scales, up_supers, r, first, COLS, F_UP, KB)
        up_low, up_high = up_at, up_at
    a = load_activations(x, live_x, k, first, COLS, acc.shape[2], KB, RB)
    for h in tl.static_range(4):
        a0, a1 = a[2 * h], a[2 * h + 1]
        acc, low, high = add_pair(acc, low, high, at, live, words, d, bias_rows, a0, a1, h, COLS, F, KB, RB)
        if F_UP is not None:
            up_acc, up_low, up_high = add_pair(
                up_acc,
                up_low,
                up_high,
                up_at,
                up_live,
                up_words,
                up_d,
                up_bias_rows,
                a0,
                a1,
                h,
                COLS,
                F_UP,
                KB,
                RB,
            )
    return acc, up_acc


@triton.jit
def bias_rows_for(bytes, F: tl.constexpr, KB: tl.constexpr, RB: tl.constexpr, dtype: tl.constexpr):
    """Returns -(bias + offset) as rows [KB * RB, 16, 16]. bytes: any 256 * RB bytes."""
    at = bytes + tl.arange(0, 16 * RB)[:, None] * 16 + tl.arange(0, KB * 16)[None, :] % 16
    return k_blocks_first(minus_offset_like(tl.load(at), F, dtype), KB, RB)


@triton.jit
def multiply_k_blocks(
    codes, scales, supers, up_codes, up_scales, up_supers, x, live, k, r,
    COLS: tl.constexpr, F: tl.constexpr, F_UP: tl.constexpr, BM: tl.constexpr, KB: tl.constexpr,
    RB: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Returns float32 [BN, BM]: rows r times the rows of activation_pointers, for the matrix and, unless F_UP is
    None, for up."""
    BN: tl.constexpr = r.shape[0]
    acc = tl.zeros([KB * RB, BN // RB, BM], tl.float32)
    up_acc = acc
    bytes = codes.to(tl.pointer_type(tl.uint8))
    up_bytes = bytes
    if F_UP is not None:
        up_bytes = up_codes.to(tl.pointer_type(tl.uint8))
    dtype: tl.constexpr = mma_dtype(x.dtype.element_ty)
    bias_rows = bias_rows_for(bytes, F, KB, RB, dtype)
    up_bias_rows = bias_rows
    if F_UP is not None:
        up_bias_rows = bias_rows_for(bytes, F_UP, KB, RB, dtype)
    # With an explicit number of stages the loop also prefetches scales, not only the operands of products.
    for first in tl.range(0, (COLS + 127) // 128, KB, num_stages=STAGES):
        acc, up_acc = add_k_blocks(
            acc, up_acc, bytes, scales, supers, up_bytes, up_scales, up_supers, x, live, k, bias_rows, up_bias_rows, r,
            first, COLS, F, F_UP, KB, RB,
        )  # fmt: skip
    return tl.sum(tl.reshape(acc, [KB, BN, BM]), 0), tl.sum(tl.reshape(up_acc, [KB, BN, BM]), 0)


@kernel
def sliced_k_gemm_kernel(
    x, codes, scales, supers, bias, block_expert, block_routes, count, out, second_codes, second_scales, second_supers,
    ROWS: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr, SECOND_ROWS: tl.constexpr, F_SECOND: tl.constexpr,
    TOP_K: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, KB: tl.constexpr, RB: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes out[i] = W x[i], as gemm.gemm_kernel does: [.., ROWS + SECOND_ROWS]; an optional second matrix gives the
    last columns. Grid (row tiles of W, then of the second matrix; blocks of BM tokens or routes)."""
    block, tile = tl.program_id(1), tl.program_id(0)
    TILES: tl.constexpr = (ROWS + BN - 1) // BN
    STRIDE: tl.constexpr = ROWS + SECOND_ROWS
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.full([], 0, tl.int64)
    if block_expert is not None:
        expert = tl.load(block_expert + block).to(tl.int64)
    routes, live, _rows = route_pointers(x, block_routes, count, block * BM + tl.arange(0, BM), COLS, 1)
    routes = part_rows(routes, TOP_K, PARTS)
    rows, live_rows, k = activation_pointers(x, block_routes, count, block, COLS, 1, BM, KB)
    # Read only here, so that the routes are not waited for after the expert.
    if block_expert is not None:
        if expert < 0:
            return
    elif block * BM >= tl.load(count):
        return
    if tile < TILES:
        row = tile * BN + tl.arange(0, BN)
        c, s, d = expert_planes(codes, scales, supers, expert, ROWS, COLS, F)
        y, _up = multiply_k_blocks(
            c,
            s,
            d,
            None,
            None,
            None,
            rows,
            live_rows,
            k,
            tl.minimum(row, ROWS - 1),
            COLS,
            F,
            None,
            BM,
            KB,
            RB,
            STAGES,
        )
        y = add_bias(y, bias, expert, row, ROWS)
        store_tile(y, out, routes, live, row, STRIDE, ROWS)
    elif SECOND_ROWS > 0:
        row = (tile - TILES) * BN + tl.arange(0, BN)
        r = tl.minimum(row, SECOND_ROWS - 1)
        y, _up = multiply_k_blocks(
            second_codes, second_scales, second_supers, None, None, None, rows, live_rows, k, r,
            COLS, F_SECOND, None, BM, KB, RB, STAGES,
        )  # fmt: skip
        if bias is not None:
            y = add_bias(y, bias + ROWS, 0, row, SECOND_ROWS)
        store_tile(y, out + ROWS, routes, live, row, STRIDE, SECOND_ROWS)


@kernel
def gated_sliced_k_gemm_kernel(
    x, codes, scales, supers, up_codes, up_scales, up_supers, bias, up_bias, block_expert, block_routes, out,
    ROWS: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr, F_UP: tl.constexpr, FORM: tl.constexpr,
    BY_ROUTE: tl.constexpr, TOP_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, KB: tl.constexpr,
    RB: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes gated(W x[route // TOP_K], W_up x[route // TOP_K]) to row `route` of out; see gemm.gated_gemm_kernel."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(1)
    expert = tl.load(block_expert + block).to(tl.int64)
    routes, live, _rows = route_pointers(x, block_routes, None, block * BM + tl.arange(0, BM), COLS, TOP_K)
    rows, live_rows, k = activation_pointers(x, block_routes, None, block, COLS, TOP_K, BM, KB)
    if expert < 0:
        return
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    r = tl.minimum(row, ROWS - 1)
    codes, scales, supers = expert_planes(codes, scales, supers, expert, ROWS, COLS, F)
    up_codes, up_scales, up_supers = expert_planes(up_codes, up_scales, up_supers, expert, ROWS, COLS, F_UP)
    y, z = multiply_k_blocks(
        codes,
        scales,
        supers,
        up_codes,
        up_scales,
        up_supers,
        rows,
        live_rows,
        k,
        r,
        COLS,
        F,
        F_UP,
        BM,
        KB,
        RB,
        STAGES,
    )
    y = add_gate_bias(y, bias, expert, routes, live, row, ROWS, BY_ROUTE)
    z = add_gate_bias(z, up_bias, expert, routes, live, row, ROWS, BY_ROUTE)
    store_tile(gated(y, z, FORM), out, routes, live, row, ROWS, ROWS)
