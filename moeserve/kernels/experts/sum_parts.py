"""The sum of a token's parts on one GPU, before the sum over all GPUs. (With a single GPU the next norm sums them.)"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel, pdl

COLUMNS = 1024  # per program


@kernel
def sum_parts_kernel(
    parts, weights, ids, count, out,
    COLS: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes `sum_parts`, with P parts per row. Grid (rows, column blocks). parts [n, P, COLS], weights float32 [n,
    P], ids int32 [n, P], out [n, COLS]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(count):
        return
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < COLS
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(P):
        here = tl.load(ids + row * P + j) >= 0
        part = tl.load(parts + (row * P + j) * COLS + c, live & here, 0.0).to(tl.float32)
        total += part * tl.load(weights + row * P + j)
    tl.store(out + row * COLS + c, total.to(out.dtype.element_ty), live)


def sum_parts(parts: Tensor, weights: Tensor, ids: Tensor, count: Tensor, out: Tensor) -> None:
    """Computes out[i] = sum over j of weights[i, j] * parts[i, j], skipping negative ids[i, j], for i < count[0];
    other rows stay unchanged. parts [n, p, cols]; out [n, 1, cols]."""
    rows, count_parts, cols = parts.shape
    block = min(COLUMNS, triton.next_power_of_2(cols))
    sum_parts_kernel(
        (rows, -(-cols // block)), parts, weights, ids, count, out, cols, count_parts, block, pdl(),
        num_warps=4, launch_pdl=pdl(),
    )  # fmt: skip
