"""Residual and norm in one kernel: x += parts, y = RMSNorm(x) * weight, as floats and as int8 for the next product."""

# mypy: ignore-errors
# ruff: noqa: RUF005
# (Triton compiles no starred tuples.)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.quantize.triton import store_quantized


@triton.jit
def store_activations(x, y, codes, scales, row, COLS: tl.constexpr, SIZE: tl.constexpr):
    """Stores x [SIZE], whose first COLS columns are valid, as row `row` of y and of codes with scales; each
    optional."""
    c = tl.arange(0, SIZE)
    if y is not None:
        tl.store(y + row * COLS + c, x.to(y.dtype.element_ty), c < COLS)
    if codes is not None:
        store_quantized(x, codes + row * COLS, scales + row * (COLS // 32), 0, COLS, SIZE)


@triton.jit
def store_norm(
    value, gain, y, codes, scales, exact, row, COLS: tl.constexpr, EPS: tl.constexpr, SIZE: tl.constexpr
):
    """Stores the norm of value [SIZE] times gain as row `row` of y, of codes with scales, and of exact; each
    optional. gain None: value itself."""
    normed = value
    if gain is not None:
        scale = tl.rsqrt(tl.sum(value * value, 0) / COLS + EPS)
        normed = value * scale * gain
    store_activations(normed, y, codes, scales, row, COLS, SIZE)
    if exact is not None:
        c = tl.arange(0, SIZE)
        tl.store(exact + row * COLS + c, normed, c < COLS)


@kernel
def add_norm_kernel(
    x, parts, part_weights, part_ids, attended, extra, rows, count, weight, y, codes, scales, exact,
    COLS: tl.constexpr, P: tl.constexpr, EPS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
    CENTERED: tl.constexpr,
):  # fmt: skip
    """Computes x = x + attended + extra + sum_j part_weights[j] * parts[j], then y = RMSNorm(x) * weight. A program per
    row i < count[0]. With rows, it reads row rows[i] of x, and x is not written.

    x float32 [n, COLS]; parts [n, P, COLS], weighted by part_weights [n, P]; parts whose part_ids [n, P] are negative
    do not count; attended and extra float32 [n, COLS], optional. y, codes with scales, exact float32: [m, COLS], each
    optional. SIZE: COLS or the power of two above. CENTERED: y is of x less its mean. weight None: y = x.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0)
    # Everything is loaded before anything is used: one round trip to memory instead of one per part.
    existing = tl.load(count)
    token = i if rows is None else tl.where(i < existing, tl.load(rows + i), 0)
    row = token.to(tl.int64)
    c = tl.arange(0, SIZE)
    live = c < COLS
    gain = None
    if weight is not None:
        gain = tl.load(weight + c, live, 0.0)
    value = tl.load(x + row * COLS + c, live, 0.0)
    if attended is not None:
        value += tl.load(attended + row * COLS + c, live, 0.0)
    if extra is not None:
        value += tl.load(extra + row * COLS + c, live, 0.0)
    values, shares, ids = (), (), ()
    for j in tl.static_range(P):
        values = values + (tl.load(parts + (row * P + j) * COLS + c, live, 0.0),)
        if part_weights is not None:
            shares = shares + (tl.load(part_weights + row * P + j),)
        if part_ids is not None:
            ids = ids + (tl.load(part_ids + row * P + j),)
    if i >= existing:
        return
    for j in tl.static_range(P):
        part = values[j].to(tl.float32)
        if part_weights is not None:
            part *= shares[j]
        if part_ids is not None:
            part = tl.where(ids[j] >= 0, part, 0.0)
        value += part
    if rows is None and (parts is not None or attended is not None or extra is not None):
        tl.store(x + row * COLS + c, value, live)
    if CENTERED:
        value = tl.where(live, value - tl.sum(value, 0) / COLS, 0.0)
    store_norm(value, gain, y, codes, scales, exact, i.to(tl.int64), COLS, EPS, SIZE)
