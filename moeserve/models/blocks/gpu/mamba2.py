"""Computes output(norm((mamba2(conv(x, B, C), dt) + D x) * silu(z))) with z, x, B, C, dt = in(y), as launches on the
current stream: the same as blocks/cpu/mamba2.py."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.mamba2.op import Mamba2Tensors, convolve, gated_norm, scan
from moeserve.kernels.stream_operands import StateLayer
from moeserve.models.blocks.gpu.delta_net import first_of
from moeserve.models.blocks.gpu.linear import multiply, multiply_all
from moeserve.models.blocks.gpu.workspace import GpuStateRows, GpuWorkspace
from moeserve.models.loading.gpu_weights import GpuMamba2
from moeserve.models.mamba2 import Mamba2Shape


def recur_mamba2(
    shape: Mamba2Shape,
    w: GpuMamba2,
    state: StateLayer,
    rows: GpuStateRows,
    count: Tensor,
    s: GpuWorkspace,
    records: Tensor | None = None,
) -> None:
    """Launches the block. Reads s.y, the norm of x; writes the output to s.output and advances the sequences' states.
    count: int32 [1] on the device, the number of valid rows. records: where drafts' state changes are recorded, see
    `scan`."""
    heads, space, p = shape.heads, s.mamba2, w.parameters
    assert space is not None
    out = space.out
    assert out.x is not None
    (projected,) = multiply_all([w.input], [shape.input_width], s.y, count, s.projected, s.dense)
    z, others = projected[:, : heads.value_width], projected[:, heads.value_width :]
    own_states = state.states[:, state.first :]
    x = Mamba2Tensors(others, space.mixed, p.rate, p.dt_bias, p.skip, own_states, out.x)
    convolve(x, p.conv, p.conv_bias, heads, rows.sequences, count)
    if rows.num_recurrent:
        scan(x, heads, first_of(rows.sequences, rows.num_recurrent), by_chunks=False, records=records)
    if rows.chunked is not None:
        scan(x, heads, rows.chunked, by_chunks=True)
    # In place: a group's output is read before it is overwritten.
    gated_norm(out.x, z, p.norm, shape.eps, heads.num_groups, count, out.x, out.codes, out.scales)
    multiply(w.output, out, count, s.output.view(s.rows, -1), s.dense)
