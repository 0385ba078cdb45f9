"""Launches the addition of n-gram embeddings to a residual of several streams on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moeserve.kernels.delta_net.op import StepSequences
from moeserve.kernels.launch import next_power_of_2, pdl
from moeserve.kernels.ngrams.triton import conv_kernel, gate_kernel, state_kernel
from moeserve.kernels.norm.op import norm_warps
from moeserve.kernels.residual_operations import NgramNorms

BLOCK = 256  # channels per program of the convolution


@dataclass(frozen=True, slots=True)
class NgramTensors:
    """The tensors of a step that the n-gram embeddings of one layer read and write, on the GPU. n: padded number of
    rows."""

    key: Tensor  # [n, streams * hidden], floats, rows at any stride
    value: Tensor  # [n, hidden], likewise
    factors: Tensor  # float32 [n, streams]: scratch for the gates
    inputs: Tensor  # float32 [n, streams * hidden]: scratch for the convolution's inputs


def add_ngrams(
    x: Tensor,
    t: NgramTensors,
    norms: NgramNorms,
    conv: Tensor,
    dilation: int,
    eps: float,
    states: Tensor,
    sequences: StepSequences,
    count: Tensor,
) -> None:
    """Computes x[i, s] += factors[i, s] * value[i] + silu(convolution)[i, s] for i < count[0], and advances the
    sequences' states. x float32 [n, streams * hidden]; conv float32 [taps, streams * hidden]; states float32 [slots,
    any]: a slot's first (taps - 1) * dilation * streams * hidden are this layer's. eps: added to the mean square under
    the norm's root."""
    n, streams = t.factors.shape
    channels, hidden, taps = x.shape[1], x.shape[1] // streams, len(conv)
    size, s = next_power_of_2(hidden), sequences
    gate_kernel(
        (n, streams), x, t.key, t.value, norms.query, norms.key, norms.conv, count, t.factors, t.inputs,
        streams, hidden, t.key.stride(0), t.value.stride(0), eps, size, pdl(),
        num_warps=norm_warps(size), launch_pdl=pdl(),
    )  # fmt: skip
    blocks = -(-channels // BLOCK)
    conv_kernel(
        (n, blocks), t.inputs, t.factors, t.value, conv, states, s.row_sequence, s.first, s.slot, count, x,
        streams, hidden, t.value.stride(0), states.stride(0), taps, dilation, BLOCK, pdl(),
        num_warps=2, launch_pdl=pdl(),
    )  # fmt: skip
    state_kernel(
        (len(s.first), blocks), t.inputs, states, s.first, s.count, s.slot,
        channels, states.stride(0), (taps - 1) * dilation, BLOCK, pdl(), num_warps=2, launch_pdl=pdl(),
    )  # fmt: skip
