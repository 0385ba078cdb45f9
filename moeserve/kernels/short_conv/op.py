"""Launches LFM2's short convolution of a step's sequences on a GPU."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.delta_net.op import StepSequences
from moeserve.kernels.launch import pdl
from moeserve.kernels.short_conv.conv import commit_kernel, conv_kernel, state_kernel
from moeserve.kernels.short_conv.heads import ShortConvHeads

BLOCK = 256  # channels per program


def short_conv(
    rows: Tensor,
    conv: Tensor,
    heads: ShortConvHeads,
    states: Tensor,
    sequences: StepSequences,
    count: Tensor,
    y: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    records: Tensor | None = None,
) -> None:
    """Computes y = c * conv(b * x), for rows below count[0], and advances the sequences' states. rows [n, row_width],
    at any stride; conv float32 [conv_kernel, channels]; states float32 [slots, any]: a slot's first heads.state_values
    are this layer's; y and codes with scales: GpuActivations [n, channels]. records: float32 [drafts, channels],
    written for `commit_drafts`; None: all rows advance the states, as if none were drafts."""
    h, s = heads, sequences
    blocks = -(-h.channels // BLOCK)
    sizes = rows.stride(0), states.stride(0), h.channels, h.conv_kernel, BLOCK, pdl()
    conv_kernel(
        (len(rows), blocks), rows, conv, states, s.row_sequence, s.first, s.slot, count, y, codes, scales, *sizes,
        num_warps=2, launch_pdl=pdl(),
    )  # fmt: skip
    state_kernel(
        (len(s.first), blocks), rows, states, s.first, s.count, s.slot, *s.draft_arguments(records), *sizes,
        num_warps=2, launch_pdl=pdl(),
    )  # fmt: skip


def commit_drafts(
    records: Tensor, states: Tensor, layer_first: Tensor, moved: Tensor, count: int, heads: ShortConvHeads
) -> None:
    """Advances the states of all layers of `count` sequences, in place, by their accepted drafts, in one launch; the
    arguments are those of the delta rule's `commit_drafts`."""
    h, layers = heads, len(layer_first)
    commit_kernel(
        (count * layers, -(-h.channels // BLOCK)), records, states, layer_first, moved, moved.stride(0), layers,
        records.stride(0), states.stride(0), h.channels, h.conv_kernel, BLOCK, num_warps=2,
    )  # fmt: skip
