"""The operations between the products of a sandwiched layer, whose blocks have norms before and after them;
`reference.py` specifies them."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.norm.parts import add_parts
from moeserve.kernels.norm.triton import store_activations


@triton.jit
def inverse_rms(x, COLS: tl.constexpr, EPS: tl.constexpr):
    return tl.rsqrt(tl.sum(x * x, 0) / COLS + EPS)


@kernel
def sandwich_inputs_kernel(
    x, block, block_norm, count, dense_norm, dense, dense_codes, dense_scales, router_norm, router, experts_norm,
    experts, experts_codes, experts_scales,
    COLS: tl.constexpr, EPS: tl.constexpr, BEHIND_EPS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes x += norm(block), then dense, router and experts = norm(x), each with its own weight [COLS]. A program
    per row i < count[0]; router and experts are skipped if router_norm or experts_norm is None. dense_norm None: dense
    and router = x, without experts. BEHIND_EPS is that of block_norm. x float32, block [n, COLS]; outputs, and their
    codes with scales: [n, COLS], each optional. SIZE: COLS or the power of two above."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0)
    row = i.to(tl.int64)
    existing = tl.load(count)
    c = tl.arange(0, SIZE)
    live = c < COLS
    value = tl.load(x + row * COLS + c, live, 0.0)
    added = tl.load(block + row * COLS + c, live, 0.0).to(tl.float32)
    gain = tl.load(block_norm + c, live, 0.0)
    if dense_norm is not None:
        of_dense = tl.load(dense_norm + c, live, 0.0)
    if router_norm is not None:
        of_router = tl.load(router_norm + c, live, 0.0)
    if experts_norm is not None:
        of_experts = tl.load(experts_norm + c, live, 0.0)
    if i >= existing:
        return
    value += added * inverse_rms(added, COLS, BEHIND_EPS) * gain
    tl.store(x + row * COLS + c, value, live)
    if dense_norm is None:
        store_activations(value, dense, dense_codes, dense_scales, row, COLS, SIZE)
        store_activations(value, router, None, None, row, COLS, SIZE)
    else:
        value *= inverse_rms(value, COLS, EPS)
        store_activations(value * of_dense, dense, dense_codes, dense_scales, row, COLS, SIZE)
    if router_norm is not None:
        store_activations(value * of_router, router, None, None, row, COLS, SIZE)
    if experts_norm is not None:
        store_activations(value * of_experts, experts, experts_codes, experts_scales, row, COLS, SIZE)


@kernel
def sandwich_sum_kernel(
    x, dense, parts, part_weights, part_ids, extra, rows, count, dense_norm, experts_norm, output_norm, factor, weight,
    y, codes, scales,
    COLS: tl.constexpr, DENSE_STRIDE: tl.constexpr, P: tl.constexpr, PART_STRIDE: tl.constexpr, EPS: tl.constexpr,
    BEHIND_EPS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds a sandwiched layer's feed-forward outputs to x and stores the next norm. A program per row i < count[0].
    With rows, it reads row rows[i], and x is not written.

    x = (x + norm(norm(dense) + norm(experts))) * factor and y = norm(x), with the norms' weights dense_norm,
    experts_norm, output_norm and weight [COLS]. Without dense: x = (x + norm(experts)) * factor. Without weight: y = x.
    BEHIND_EPS is that of output_norm.
    experts: the sum of extra float32 [n, COLS], optional, and of P parts, optionally weighted by part_weights; parts
    whose part_ids are negative do not count. DENSE_STRIDE, PART_STRIDE: rows of [COLS] from one row's dense output, or
    first part, to the next row's; weights and ids likewise. factor float32 [1]; None: 1. y, codes with scales: [m,
    COLS], each optional. SIZE: COLS or the power of two above.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0)
    existing = tl.load(count)
    token = i if rows is None else tl.where(i < existing, tl.load(rows + i), 0)
    row = token.to(tl.int64)
    c = tl.arange(0, SIZE)
    live = c < COLS
    value = tl.load(x + row * COLS + c, live, 0.0)
    if dense is not None:
        d = tl.load(dense + row * (DENSE_STRIDE * COLS) + c, live, 0.0).to(tl.float32)
    e = tl.zeros([SIZE], tl.float32)
    if extra is not None:
        e += tl.load(extra + row * COLS + c, live, 0.0)
    if i >= existing:
        return
    e = add_parts(e, parts, part_weights, part_ids, row, c, live, COLS, P, PART_STRIDE)
    total = e
    if dense is not None:
        total = d * inverse_rms(d, COLS, EPS) * tl.load(dense_norm + c, live, 0.0)
        total += e * inverse_rms(e, COLS, EPS) * tl.load(experts_norm + c, live, 0.0)
    value += total * inverse_rms(total, COLS, BEHIND_EPS) * tl.load(output_norm + c, live, 0.0)
    if factor is not None:
        value *= tl.load(factor)
    if rows is None:
        tl.store(x + row * COLS + c, value, live)
    if weight is not None:
        value = value * inverse_rms(value, COLS, EPS) * tl.load(weight + c, live, 0.0)
    store_activations(value, y, codes, scales, i.to(tl.int64), COLS, SIZE)
