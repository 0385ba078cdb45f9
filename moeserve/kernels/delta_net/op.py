"""Launches the gated DeltaNet of a step's sequences on a GPU: convolution, delta rule, gated norm."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels.delta_net import chunked_kimi
from moeserve.kernels.delta_net.chunked import inverse_kernel, scan_kernel
from moeserve.kernels.delta_net.conv import conv_kernel
from moeserve.kernels.delta_net.gate import gated_norm_kernel, sigmoid_gate_kernel, sigmoid_mul_kernel
from moeserve.kernels.delta_net.heads import DELTA_CHUNK, DeltaHeads
from moeserve.kernels.delta_net.recurrent import commit_kernel, recurrent_kernel
from moeserve.kernels.launch import HOPPER_SHARED_MEMORY, next_power_of_2, pdl, shared_memory

GATE_BLOCK = 1024  # columns of attention's gate per program
COLUMNS = 32  # state columns per program: 128 programs for one token with 32 heads of 128 columns


@dataclass(frozen=True, slots=True)
class SequenceDrafts:
    """The drafts of a step, by sequence, int32 [sequences] each, on the device: how many of its last rows are drafts,
    which do not change its state, and where the records of their changes begin."""

    count: Tensor
    first: Tensor

    def of_first(self, sequences: int) -> SequenceDrafts:
        """Returns the drafts of the first `sequences` sequences."""
        return SequenceDrafts(self.count[:sequences], self.first[:sequences])


@dataclass(frozen=True, slots=True)
class StepSequences:
    """The sequences whose states a step's rows advance; int32 on the device. Sequence i has rows first[i] ..
    first[i] + count[i] - 1 and its state in slot[i]; count 0: padding."""

    first: Tensor  # [sequences]
    count: Tensor
    slot: Tensor
    row_sequence: Tensor  # [rows]: sequence of each row
    drafts: SequenceDrafts | None = None  # None: the engine has no drafts

    def draft_arguments(self, records: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns what a kernel takes of the drafts: their counts and first records by sequence, and `records`. All
        None without drafts or without records."""
        if records is None or self.drafts is None:
            return None, None, None
        return self.drafts.count, self.drafts.first, records


@dataclass(frozen=True, slots=True)
class Gates:
    """The inputs of the gates. b and a of value head h in row t are at [t, h // r * group + h % r], with r value heads
    per key head. Kimi's a is [n, decays]."""

    b: Tensor
    a: Tensor
    group: int


@dataclass(frozen=True, slots=True)
class DeltaTensors:
    """The tensors that one layer reads and writes in a step: projections, gates, states and output, on the GPU. n:
    padded number of rows."""

    qkv: Tensor  # [n, channels], rows at any stride
    mixed: Tensor  # [n, channels]: scratch for the convolution's output
    gates: Gates
    rate: Tensor  # float32 [value_heads]: -exp(A_log)
    dt_bias: Tensor  # float32 [decays]
    # float32 [slots, values], rows at any stride. A slot's first heads.state_values are this layer's:
    # [value_heads, key_dim, value_dim] and [conv_kernel - 1, channels].
    states: Tensor
    out: Tensor  # [n, value_width]


def convolve(
    x: DeltaTensors, conv: Tensor, heads: DeltaHeads, sequences: StepSequences, num_rows: Tensor
) -> None:
    """Computes mixed = silu(causal convolution of qkv), with q and k normalised, for rows below num_rows[0]. conv:
    float32 [conv_kernel, channels]. This call does not change the convolution state; the delta rule does so
    afterwards."""
    h = heads
    conv_kernel(
        (len(x.mixed), 2 * h.key_heads + h.value_heads), x.qkv, conv, x.states, sequences.row_sequence,
        sequences.first, sequences.slot, num_rows, x.mixed, x.qkv.stride(0), x.states.stride(0), h.delta_values,
        h.key_heads, h.value_heads, h.key_dim, h.value_dim, h.conv_kernel,
        next_power_of_2(max(h.key_dim, h.value_dim)), pdl(),
        num_warps=1, launch_pdl=pdl(),
    )  # fmt: skip


def recurrent_rule(
    x: DeltaTensors, heads: DeltaHeads, sequences: StepSequences, records: Tensor | None = None
) -> None:
    """Computes the delta rule token by token for the sequences' rows: writes x.out and advances the states and
    convolution states in x.states. records: float32 [drafts, heads.pending_values], written for `commit_drafts`; None:
    all rows advance the states, as if none were drafts."""
    h = heads
    recurrent_kernel(
        (len(sequences.first), h.value_heads, h.value_dim // COLUMNS), x.qkv, x.mixed, x.gates.b, x.gates.a, x.rate,
        x.dt_bias, x.states, sequences.first, sequences.count, sequences.slot, *sequences.draft_arguments(records),
        x.out, x.qkv.stride(0),
        x.gates.b.stride(0), x.gates.a.stride(0), x.gates.group, x.states.stride(0), h.delta_values, h.key_heads,
        h.value_heads, h.key_dim, h.value_dim, h.is_tiled, h.conv_kernel,
        next_power_of_2(h.key_dim), COLUMNS, _share(h), h.is_kimi, h.decay_bound, h.pending_values, pdl(),
        num_warps=4, launch_pdl=pdl(),
    )  # fmt: skip


def commit_drafts(
    records: Tensor, states: Tensor, layer_first: Tensor, moved: Tensor, count: int, heads: DeltaHeads
) -> None:
    """Advances the states of all layers of `count` sequences, in place, by their accepted drafts, in one launch.

    records: float32 [layers, drafts, heads.pending_values], from `recurrent_rule`; states: float32 [slots, values];
    layer_first: int32 [layers], each layer's first number in a slot; moved: int32 [3, count or more], each sequence's
    state slot, first record and number of accepted drafts, at least 1. All slots differ.
    """
    h, layers = heads, len(layer_first)
    commit_kernel(
        (count * layers, h.value_heads, h.value_dim // COLUMNS), records, states, layer_first, moved,
        moved.stride(0), layers, records.stride(0), h.pending_values, states.stride(0), h.delta_values, h.key_heads,
        h.value_heads, h.key_dim, h.value_dim, h.is_tiled, h.conv_kernel, next_power_of_2(h.key_dim), COLUMNS,
        _share(h), h.is_kimi, num_warps=4,
    )  # fmt: skip


def chunked_rule(
    x: DeltaTensors, heads: DeltaHeads, sequences: StepSequences, chunks: Tensor, inverse: Tensor
) -> None:
    """Computes the delta rule in chunks, for sequences with many rows, none empty: writes x.out and advances the states
    and convolution states in x.states. For Kimi, whose decays differ by dimension, see `kimi_chunked_rule`.

    chunks: int32 [chunks, 2], first row and number of rows, from `chunks_of`; inverse: scratch of mixed's dtype [n,
    value_heads, DELTA_CHUNK].
    """
    h = heads
    precision = "tf32x3" if x.mixed.dtype is torch.float32 else "tf32"
    inverse_kernel(
        (len(chunks), h.value_heads), x.mixed, x.gates.b, x.gates.a, x.rate, x.dt_bias, chunks, inverse,
        x.gates.b.stride(0), x.gates.a.stride(0), x.gates.group, h.key_heads, h.value_heads, h.key_dim, h.value_dim,
        h.is_tiled, next_power_of_2(h.key_dim), precision, pdl(), num_warps=4, launch_pdl=pdl(),
    )  # fmt: skip
    scan_kernel(
        (len(sequences.first), h.value_heads, h.value_dim // COLUMNS), x.qkv, x.mixed, x.gates.b, x.gates.a, x.rate,
        x.dt_bias, x.states, sequences.first, sequences.count, sequences.slot, inverse, x.out, x.qkv.stride(0),
        x.gates.b.stride(0), x.gates.a.stride(0), x.gates.group, x.states.stride(0), h.delta_values, h.key_heads,
        h.value_heads, h.key_dim, h.value_dim, h.is_tiled, h.conv_kernel,
        next_power_of_2(h.key_dim), COLUMNS, _share(h),
        precision, pdl(), num_warps=4, launch_pdl=pdl(),
    )  # fmt: skip


def kimi_chunks_fit(dtype: torch.dtype) -> bool:
    """Returns whether `kimi_chunked_rule` fits this GPU's shared memory for this dtype of the convolution's output.
    With float32 its kernels need 128 KiB, more than consumer GPUs have."""
    return dtype is not torch.float32 or shared_memory() >= HOPPER_SHARED_MEMORY


def kimi_chunked_rule(
    x: DeltaTensors,
    heads: DeltaHeads,
    sequences: StepSequences,
    chunks: Tensor,
    inverse: Tensor,
    scores: Tensor,
) -> None:
    """Computes `chunked_rule` for Kimi Delta Attention, which has a decay for each key dimension: writes x.out and
    advances x.states. chunks, inverse: as in `chunked_rule`; scores: scratch of the shape and dtype of `inverse`."""
    h = heads
    precision = "tf32x3" if x.mixed.dtype is torch.float32 else "tf32"
    size, gates = next_power_of_2(h.key_dim), x.gates
    chunked_kimi.weights_kernel(
        (len(chunks), h.value_heads), x.mixed, gates.b, gates.a, x.rate, x.dt_bias, chunks, inverse, scores,
        gates.b.stride(0), gates.a.stride(0), h.value_heads, h.key_dim, h.value_dim, size, h.decay_bound, precision,
        pdl(), num_warps=8, launch_pdl=pdl(),
    )  # fmt: skip
    chunked_kimi.scan_kernel(
        (len(sequences.first), h.value_heads, h.value_dim // COLUMNS), x.qkv, x.mixed, gates.b, gates.a, x.rate,
        x.dt_bias, x.states, sequences.first, sequences.count, sequences.slot, inverse, scores, x.out, x.qkv.stride(0),
        gates.b.stride(0), gates.a.stride(0), x.states.stride(0), h.delta_values, h.value_heads, h.key_dim, h.value_dim,
        h.conv_kernel, size, COLUMNS, _share(h), h.decay_bound, precision, pdl(), num_warps=8, launch_pdl=pdl(),
    )  # fmt: skip


def chunks_of(first: npt.NDArray[np.int32], count: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Returns the chunks, int32 [chunks, 2] (first row, number of rows), of sequences with rows first[i] .. first[i]
    + count[i] - 1."""
    per_sequence = -(-count // DELTA_CHUNK)
    sequence = np.repeat(np.arange(len(count)), per_sequence)
    number = np.arange(len(sequence)) - np.repeat(np.cumsum(per_sequence) - per_sequence, per_sequence)
    start = number * DELTA_CHUNK
    rows = np.minimum(count[sequence] - start, DELTA_CHUNK)
    return np.stack([first[sequence] + start, rows], axis=1).astype(np.int32)


def gated_norm(
    o: Tensor,
    z: Tensor,
    norm: Tensor,
    eps: float,
    count: Tensor,
    y: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    *,
    sigmoid: bool = False,
) -> None:
    """Launches y[i] = RMSNorm(o[i]) * norm * silu(z[i]) for each head, for i < count[0]. sigmoid: the gate is
    sigmoid(z[i]) instead.

    o [n, heads * dim]; z of the same shape, with any row stride; norm float32 [dim]. The result is written as floats
    to y, and as int8 to codes with scales (both optional; see GpuActivations): [n, heads * dim]. eps: added to the
    mean square under the norm's root."""
    dim = len(norm)
    n, width = o.shape
    gated_norm_kernel(
        (n, width // dim), o, z, norm, count, y, codes, scales, z.stride(0), width // dim, dim, eps,
        next_power_of_2(dim), sigmoid, pdl(),
        num_warps=1, launch_pdl=pdl(),
    )  # fmt: skip


def sigmoid_gate(
    x: Tensor,
    gate: Tensor,
    dim: int,
    count: Tensor,
    codes: Tensor | None,
    scales: Tensor | None,
    *,
    softplus: bool = False,
) -> None:
    """Computes x[i] *= sigmoid(gate[i]), or softplus(gate[i]), for i < count[0]; codes with scales: x quantised. x [n,
    heads * dim]; gate of that shape, or [n, heads], rows at any stride. Without codes, rows from count[0] on may be
    multiplied too."""
    n, width = x.shape
    by_head = gate.shape[1] != width
    if (
        codes is None and x.dtype == gate.dtype and not by_head and not softplus
    ):  # faster than one program per head
        grid = n, -(-width // GATE_BLOCK)
        sigmoid_mul_kernel(
            grid, x, gate, width, gate.stride(0), GATE_BLOCK, pdl(), num_warps=4, launch_pdl=pdl()
        )
        return
    sigmoid_gate_kernel(
        (n, width // dim), x, gate, count, codes, scales, gate.stride(0), width // dim, dim, next_power_of_2(dim),
        by_head, softplus, pdl(), num_warps=1, launch_pdl=pdl(),
    )  # fmt: skip


def _share(heads: DeltaHeads) -> int:
    """Returns the channels whose convolution state a program advances, at most."""
    return next_power_of_2(-(-heads.channels // (heads.value_heads * (heads.value_dim // COLUMNS))))
