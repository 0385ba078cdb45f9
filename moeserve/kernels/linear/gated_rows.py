"""Computes gated(gate, up) for rows with both products side by side, as floats and as int8 for the next product."""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.linear.gated import gated
from moeserve.kernels.quantize.triton import store_quantized


@kernel
def gated_rows_kernel(
    products, count, h, codes, scales,
    COLS: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes h = gated(gate's product, up's product) for rows below count[0]. Grid (n, blocks of BLOCK columns).
    products float32 [n, 2 * COLS]: gate's product of row i < count[0], then up's. h, and codes with scales: [n, COLS],
    each optional."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, first = tl.program_id(0), tl.program_id(1) * BLOCK
    existing = tl.load(count)
    row = i.to(tl.int64)
    c = first + tl.arange(0, BLOCK)
    live = c < COLS
    gate = tl.load(products + row * (2 * COLS) + c, live, 0.0)
    up = tl.load(products + row * (2 * COLS) + COLS + c, live, 0.0)
    if i >= existing:
        return
    out = gated(gate, up, FORM)
    if h is not None:
        tl.store(h + row * COLS + c, out.to(h.dtype.element_ty), live)
    if codes is not None:
        store_quantized(out, codes + row * COLS, scales + row * (COLS // 32), first, COLS, BLOCK)
