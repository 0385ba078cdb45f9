"""A block's norm and the router's product in one kernel: both are short, so saving a launch matters.

Every program recomputes the norm of its row, which is cheaper than waiting for another program's. One more program a
row stores it, so that no program both multiplies and quantises.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.norm.triton import store_norm


@triton.jit
def store_logits(
    value, w, gain, bias, logits, i, tile,
    COLS: tl.constexpr, EXPERTS: tl.constexpr, SIZE: tl.constexpr, BE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Stores row i's logits for the tile's experts, whose rows of the router are w [BE, SIZE], from the norm of value
    [SIZE] times gain. The norm's factor multiplies the products: neither sum waits for the other."""
    e = tile * BE + tl.arange(0, BE)
    products = tl.sum(w.to(tl.float32) * (value * gain)[None, :], 1)
    products *= tl.rsqrt(tl.sum(value * value, 0) / COLS + EPS)
    if bias is not None:
        products += tl.load(bias + e, e < EXPERTS, 0.0)
    tl.store(logits + i * EXPERTS + e, products, e < EXPERTS)


@kernel
def norm_router_kernel(
    x, extra, count, weight, router, bias, y, codes, scales, logits,
    COLS: tl.constexpr, EXPERTS: tl.constexpr, SIZE: tl.constexpr, BE: tl.constexpr, EPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes y = RMSNorm(x + extra) * weight and logits = router y + bias, for rows below count[0]; x stays
    unchanged. Grid (EXPERTS in tiles of BE, and one program more for y; rows).

    x, extra float32 [n, COLS]; router [EXPERTS, COLS] floats; bias float32 [EXPERTS], optional; logits float32 [n,
    EXPERTS]; y, and codes with scales: [n, COLS], each optional. SIZE: COLS or the power of two above. The count,
    weight and router are read before the previous kernel has ended: it must not write them."""
    if PDL:
        gdc_launch_dependents()
    tile, i = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c, e = tl.arange(0, SIZE), tile * BE + tl.arange(0, BE)
    live = c < COLS
    existing = tl.load(count)
    w = tl.load(router + e[:, None] * COLS + c[None, :], (e < EXPERTS)[:, None] & live[None, :], 0.0)
    gain = tl.load(weight + c, live, 0.0)
    if PDL:
        gdc_wait()
    if i >= existing:
        return
    value = tl.load(x + i * COLS + c, live, 0.0) + tl.load(extra + i * COLS + c, live, 0.0)
    if tile == tl.num_programs(0) - 1:
        store_norm(value, gain, y, codes, scales, None, i, COLS, EPS, SIZE)
    else:
        store_logits(value, w, gain, bias, logits, i, tile, COLS, EXPERTS, SIZE, BE, EPS)
