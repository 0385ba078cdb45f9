"""A tower's operations between products, each in one kernel that reads and writes every number once.

A picture of 4,000 tokens has 16,000 patches, whose rows of 1,152 and 4,304 numbers do not fit into the L2 cache: in
operations of torch they took a quarter of the tower's time on an H200 (docs/results/gpu-engine.md).
"""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl

from moeserve.kernels.launch import kernel


@kernel
def layer_norm_kernel(
    x, weight, bias, y, rest,
    COLS: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A program per ROWS rows. y = LayerNorm(x), rounded; rest, optional: the part that rounding removes, rounded."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = tl.arange(0, SIZE)[None, :]
    live = c < COLS
    value = tl.load(x + row * COLS + c, live, 0.0)
    centered = tl.where(live, value - tl.sum(value, 1)[:, None] / COLS, 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, 1) / COLS + EPS)
    normed = centered * scale[:, None] * tl.load(weight + c, live, 0.0) + tl.load(bias + c, live, 0.0)
    rounded = normed.to(y.dtype.element_ty)
    tl.store(y + row * COLS + c, rounded, live)
    if rest is not None:
        tl.store(rest + row * COLS + c, (normed - rounded.to(tl.float32)).to(y.dtype.element_ty), live)


@kernel
def split_heads_kernel(
    first, rest, bias, cos, sin, out,
    HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, HEADS_SIZE: tl.constexpr, HALF_SIZE: tl.constexpr,
):  # fmt: skip
    """Adds the product's parts and the bias, divides rows into q, k and v by head, and rotates q and k in split halves.
    Grid (n / ROWS, 3): q, k and v of ROWS rows. HALF: half of a head's numbers. first + rest + bias [n, 3 * HEADS * 2 *
    HALF]; rest, bias, and cos with sin are optional. out [3, n, HEADS, 2 * HALF]."""
    WIDTH: tl.constexpr = HEADS * 2 * HALF
    part = tl.program_id(1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None, None]
    head = tl.arange(0, HEADS_SIZE)[None, :, None]
    d = tl.arange(0, HALF_SIZE)[None, None, :]
    live = (head < HEADS) & (d < HALF)
    column = part * WIDTH + head * (2 * HALF) + d
    at = row * (3 * WIDTH) + column
    a = tl.load(first + at, live, 0.0)
    b = tl.load(first + at + HALF, live, 0.0)
    if rest is not None:
        a += tl.load(rest + at, live, 0.0)
        b += tl.load(rest + at + HALF, live, 0.0)
    if bias is not None:
        a += tl.load(bias + column, live, 0.0)
        b += tl.load(bias + column + HALF, live, 0.0)
    if cos is not None:
        turns = (d < HALF) & (part < 2)
        c = tl.load(cos + row * HALF + d, turns, 1.0)
        s = tl.load(sin + row * HALF + d, turns, 0.0)
        a, b = a * c - b * s, b * c + a * s
    to = out + part.to(tl.int64) * tl.num_programs(0) * (ROWS * WIDTH) + row * WIDTH + head * (2 * HALF) + d
    tl.store(to, a.to(out.dtype.element_ty), live)
    tl.store(to + HALF, b.to(out.dtype.element_ty), live)


@kernel
def gelu_kernel(
    product, bias, out,
    COLS: tl.constexpr, TANH: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Grid (n / ROWS, COLS / SIZE): out = gelu(product + bias), rounded. TANH: the approximation by tanh."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = (tl.program_id(1) * SIZE + tl.arange(0, SIZE))[None, :]
    live = c < COLS
    x = tl.load(product + row * COLS + c, live, 0.0)
    if bias is not None:
        x += tl.load(bias + c, live, 0.0)
    if TANH:
        # 0.5 * (1 + tanh(u)) = 1 / (1 + exp(-2u))
        found = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        found = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    tl.store(out + row * COLS + c, found.to(out.dtype.element_ty), live)


@kernel
def add_product_kernel(
    x, product, bias,
    COLS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A program per ROWS rows: x += product + bias."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = tl.arange(0, SIZE)[None, :]
    live = c < COLS
    more = tl.load(product + row * COLS + c, live, 0.0)
    if bias is not None:
        more += tl.load(bias + c, live, 0.0)
    tl.store(x + row * COLS + c, tl.load(x + row * COLS + c, live, 0.0) + more, live)
