"""Launches Mamba-2's recurrence of a step's sequences on a GPU: convolution, scan, gated norm."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moeserve.kernels.delta_net.op import COLUMNS, StepSequences
from moeserve.kernels.launch import next_power_of_2, pdl
from moeserve.kernels.mamba2.conv import conv_kernel
from moeserve.kernels.mamba2.gate import gated_norm_kernel
from moeserve.kernels.mamba2.heads import Mamba2Heads
from moeserve.kernels.mamba2.scan import commit_kernel, scan_kernel

CONV_BLOCK = 256  # channels per program of the convolution
CHUNK = 64  # tokens of a chunk
# And of wide states, whose chunks of 64 tokens take 128 KiB of shared memory: more than consumers' GPUs have.
WIDE_STATE, WIDE_CHUNK = 256, 32
WIDE_GROUP = 2048  # columns of a norm's group from which on a program uses eight warps


@dataclass(frozen=True, slots=True)
class Mamba2Tensors:
    """The tensors that one Mamba-2 layer reads and writes in a step: projected rows, weights, states and output, on the
    GPU. n: padded number of rows."""

    rows: Tensor  # [n, channels + num_heads], rows at any stride: x, B, C and dt
    mixed: Tensor  # [n, channels]: scratch for the convolution's output
    rate: Tensor  # float32 [num_heads]: -exp(A_log)
    dt_bias: Tensor  # float32 [num_heads]
    skip: Tensor  # float32 [num_heads]: D
    # float32 [slots, values], rows at any stride. A slot's first heads.state_values are this layer's: [num_heads,
    # state_dim, head_dim] and [conv_kernel - 1, channels].
    states: Tensor
    out: Tensor  # [n, value_width]


def convolve(
    x: Mamba2Tensors,
    conv: Tensor,
    bias: Tensor,
    heads: Mamba2Heads,
    sequences: StepSequences,
    num_rows: Tensor,
) -> None:
    """Computes mixed = silu(bias + causal convolution of x, B, C), for rows below num_rows[0]. conv: float32
    [conv_kernel, channels]; bias: float32 [channels]. This call does not change the convolution state; the scan does
    so afterwards."""
    conv_kernel(
        (len(x.mixed), -(-heads.channels // CONV_BLOCK)), x.rows, conv, bias, x.states, sequences.row_sequence,
        sequences.first, sequences.slot, num_rows, x.mixed, x.rows.stride(0), x.states.stride(0), heads.delta_values,
        heads.channels, heads.conv_kernel, CONV_BLOCK, pdl(),
        num_warps=2, launch_pdl=pdl(),
    )  # fmt: skip


def scan(
    x: Mamba2Tensors,
    heads: Mamba2Heads,
    sequences: StepSequences,
    *,
    by_chunks: bool,
    records: Tensor | None = None,
) -> None:
    """Computes the recurrence (Mamba-2, https://arxiv.org/abs/2405.21060) for the sequences' rows: writes x.out [n,
    value_width] and advances x.states (float32). by_chunks: True: in chunks of tokens, which is faster for sequences
    with many rows; False: token by token. records: float32 [drafts, heads.pending_values], written token by token for
    `commit_drafts`; None: all rows advance the states, as if none were drafts."""
    h = heads
    scan_kernel(
        (len(sequences.first), h.num_heads, h.head_dim // COLUMNS), x.rows, x.mixed, x.rate, x.dt_bias, x.skip,
        x.states, sequences.first, sequences.count, sequences.slot, *sequences.draft_arguments(records), x.out,
        x.rows.stride(0), x.states.stride(0),
        h.delta_values, h.num_heads, h.num_groups, h.head_dim, h.state_dim, h.conv_kernel,
        next_power_of_2(h.state_dim), COLUMNS, _share(h), by_chunks,
        WIDE_CHUNK if h.state_dim >= WIDE_STATE else CHUNK,
        "tf32x3" if x.mixed.dtype.itemsize == 4 else "tf32", h.pending_values, pdl(),
        num_warps=4, launch_pdl=pdl(),
    )  # fmt: skip


def commit_drafts(
    records: Tensor, states: Tensor, layer_first: Tensor, moved: Tensor, count: int, heads: Mamba2Heads
) -> None:
    """Advances the states of all layers of `count` sequences, in place, by their accepted drafts, in one launch; the
    arguments are those of the delta rule's `commit_drafts`."""
    h, layers = heads, len(layer_first)
    commit_kernel(
        (count * layers, h.num_heads, h.head_dim // COLUMNS), records, states, layer_first, moved, moved.stride(0),
        layers, records.stride(0), h.pending_values, states.stride(0), h.delta_values, h.num_heads, h.num_groups,
        h.head_dim, h.state_dim, h.conv_kernel, next_power_of_2(h.state_dim), COLUMNS, _share(h), num_warps=4,
    )  # fmt: skip


def _share(heads: Mamba2Heads) -> int:
    """Returns the channels whose convolution state a program advances, at most."""
    return next_power_of_2(-(-heads.channels // (heads.num_heads * (heads.head_dim // COLUMNS))))


def gated_norm(
    o: Tensor,
    z: Tensor,
    norm: Tensor | None,
    eps: float,
    groups: int,
    count: Tensor,
    y: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
) -> None:
    """Computes y[i] = RMSNorm(o[i] * silu(z[i])) * norm, normalised per group of heads, for i < count[0]. norm None:
    not normalised.

    o [n, width]; z of that shape, rows at any stride; norm float32 [width]; y and codes with scales: GpuActivations
    [n, width]. eps: added to the mean square under the norm's root."""
    n, width = o.shape
    dim = width // groups
    gated_norm_kernel(
        (n, groups), o, z, norm, count, y, codes, scales, z.stride(0), groups, dim, eps, next_power_of_2(dim), pdl(),
        num_warps=8 if dim >= WIDE_GROUP else 4, launch_pdl=pdl(),
    )  # fmt: skip
