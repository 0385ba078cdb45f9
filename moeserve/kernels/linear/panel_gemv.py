"""The GEMV of `gemv.py` for a part of a matrix: some of its panels of PANEL rows, whose numbers are on the device.

A head's product for a draft reads a shortlist of the vocabulary. Its panels change from draft to draft, so a CUDA
graph has programs for the most panels, and those behind the last one end at once.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import replace

import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from moeserve.kernels._C import PANEL_ROWS
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.launch import kernel, next_power_of_2, pdl
from moeserve.kernels.linear.gemv import multiply_rows
from moeserve.kernels.linear.op import GemvTile, floats_and_integers, gemv_tile
from moeserve.kernels.linear.operands import Weight


@kernel
def panel_gemv_kernel(
    x, x_codes, x_scales, codes, scales, supers, panels, num_panels, count, out,
    ROWS: tl.constexpr, COLS: tl.constexpr, STRIDE: tl.constexpr, F: tl.constexpr, PANEL: tl.constexpr,
    T: tl.constexpr, BR: tl.constexpr, NB: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes out[i, p * PANEL + r] = row panels[p] * PANEL + r of W, times x[i], for p < num_panels[0] and i <
    count[0].

    Rows of `out` are STRIDE apart; places after the matrix's last row stay unchanged. panels int32; they, the matrix
    and the count are read before the previous kernel has ended.

    Grid (row tiles of the most panels; blocks of T rows of x). BR * NB divides PANEL."""
    if PDL:
        gdc_launch_dependents()
    place, first = tl.program_id(0) * (BR * NB), tl.program_id(1) * T
    if place < tl.load(num_panels) * PANEL:
        end = tl.minimum(first + T, tl.load(count))
        row = tl.load(panels + place // PANEL) * PANEL + place % PANEL
        multiply_rows(
            x, x_codes, x_scales, codes, scales, supers, None, out + (place - row), row, first, end, ROWS, COLS, STRIDE,
            F, T, BR, NB, BK, PDL,
        )  # fmt: skip


def multiply_panels(
    x: GpuActivations, weight: Weight, panels: Tensor, num_panels: Tensor, count: Tensor, out: Tensor
) -> None:
    """Launches the products of x's rows i < count[0] with some panels of a matrix, PANEL_ROWS rows each
    (panel_gemv_kernel). panels: int32 [most], of which num_panels[0] are valid. out: float32 [n, width], with room for
    PANEL_ROWS columns of each panel."""
    n = len(out)
    tokens = min(4, next_power_of_2(n))
    blocks = -(-n // tokens)
    tile = _tile(weight, blocks, tokens)
    floats, words, word_scales = floats_and_integers(weight, None, x.x, x.codes, x.scales)
    panel_gemv_kernel(
        (len(panels) * PANEL_ROWS // (tile.br * tile.nb), blocks),
        *(
            floats,
            words,
            word_scales,
            weight.codes,
            weight.scales,
            weight.supers,
            panels,
            num_panels,
            count,
            out,
        ),
        *(weight.rows, weight.cols, out.stride(0), weight.format, PANEL_ROWS),
        *(tile.tokens, tile.br, tile.nb, tile.bk, pdl()),
        num_warps=tile.warps,
        launch_pdl=pdl(),
    )


def _tile(weight: Weight, blocks: int, tokens: int) -> GemvTile:
    """Returns the head's tile, with fewer rows if they are more than a panel's."""
    warps = 4
    tile = gemv_tile(weight, blocks=blocks, tokens=tokens, warps=warps)
    while tile.br > PANEL_ROWS:
        warps //= 2
        tile = gemv_tile(weight, blocks=blocks, tokens=tokens, warps=warps)
    return replace(tile, nb=min(tile.nb, PANEL_ROWS // tile.br))
