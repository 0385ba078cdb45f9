"""The gate after Mamba-2's recurrence, and the norm after the gate, as a Triton kernel; one program per row and
group."""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.quantize.triton import store_quantized


@kernel
def gated_norm_kernel(
    o, z, norm, count, y, codes, scales,
    Z_STRIDE: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, EPS: tl.constexpr, SIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes y = RMSNorm(o * silu(z)) * norm, the mean over each group, for the rows below count[0]; norm None: y =
    o * silu(z). o [n, GROUPS * DIM]; z, rows Z_STRIDE apart; norm float32 [GROUPS * DIM]. y, and codes with scales:
    [n, GROUPS * DIM], each optional. Grid (n, GROUPS)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, group = tl.program_id(0), tl.program_id(1)
    if i >= tl.load(count):
        return
    row = i.to(tl.int64)
    width: tl.constexpr = GROUPS * DIM
    c = tl.arange(0, SIZE)
    live = c < DIM
    first = group * DIM
    x = tl.load(o + row * width + first + c, live, 0.0).to(tl.float32)
    gate = tl.load(z + row * Z_STRIDE + first + c, live, 0.0).to(tl.float32)
    x *= gate / (1.0 + tl.exp(-gate))
    if norm is not None:
        x *= tl.rsqrt(tl.sum(x * x, 0) / DIM + EPS) * tl.load(norm + first + c, live, 0.0)
    if y is not None:
        tl.store(y + row * width + first + c, x.to(y.dtype.element_ty), live)
    if codes is not None:
        store_quantized(x, codes + row * width, scales + row * (width // 32), first, first + DIM, SIZE)
