"""Computes output(norm(delta_rule(conv(qkv))) * silu(z)) with qkv, z, b, a = in(y), as launches on the current stream;
the same network as blocks/cpu/delta_net.py."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.kernels.delta_net.op import (
    DeltaTensors,
    Gates,
    StepSequences,
    chunked_rule,
    convolve,
    gated_norm,
    kimi_chunked_rule,
    kimi_chunks_fit,
    recurrent_rule,
)
from moeserve.kernels.latent.op import norm_rows
from moeserve.kernels.stream_operands import StateLayer
from moeserve.models.blocks.gpu.linear import multiply, multiply_all
from moeserve.models.blocks.gpu.workspace import GpuStateRows, GpuWorkspace
from moeserve.models.loading.gpu_weights import GpuDeltaNet
from moeserve.models.recurrence import GatedDeltaNetShape


def recur(
    shape: GatedDeltaNetShape,
    w: GpuDeltaNet,
    eps: float,
    state: StateLayer,
    rows: GpuStateRows,
    count: Tensor,
    s: GpuWorkspace,
    records: Tensor | None = None,
) -> None:
    """Launches the block. Reads s.y, the norm of x; writes the output to s.output and advances the sequences' states.
    records: where drafts' state changes are recorded, see `recurrent_rule`. eps: added to the mean square under the
    norm's root; count: int32 [1] on the device, the number of valid rows."""
    heads, delta = shape.heads, s.delta
    assert delta is not None
    out = delta.out
    assert out.x is not None
    qkv, z, gates = _project_kimi(shape, w, count, s) if heads.is_kimi else _project(shape, w, count, s)
    own_states = state.states[:, state.first :]
    x = DeltaTensors(qkv, delta.mixed, gates, w.rate, w.dt_bias, own_states, out.x)
    convolve(x, w.conv, heads, rows.sequences, count)
    if rows.num_recurrent:
        recurrent_rule(x, heads, first_of(rows.sequences, rows.num_recurrent), records)
    if rows.chunked is not None:
        assert rows.chunks is not None
        assert delta.inverse is not None
        of_chunks = (x, heads, rows.chunked, rows.chunks, delta.inverse)
        if not heads.is_kimi:
            chunked_rule(*of_chunks)
        elif kimi_chunks_fit(x.mixed.dtype):
            assert delta.scores is not None
            kimi_chunked_rule(*of_chunks, delta.scores)
        else:
            recurrent_rule(x, heads, rows.chunked)
    # In place: a head's output is read before it is overwritten.
    gated_norm(
        out.x, z, w.output_norm, eps, count, out.x, out.codes, out.scales, sigmoid=heads.has_sigmoid_gate
    )
    multiply(w.output, out, count, s.output.view(s.rows, -1), s.dense)


def _project(
    shape: GatedDeltaNetShape, w: GpuDeltaNet, count: Tensor, s: GpuWorkspace
) -> tuple[Tensor, Tensor, Gates]:
    """Launches the products of s.y. Returns qkv, z and the gates."""
    heads = shape.heads
    qkv, z, b, *apart = multiply_all(
        w.inputs, [width for _, width in shape.input_parts], s.y, count, s.projected, s.dense
    )
    per_key = heads.value_heads // heads.key_heads
    return qkv, z, Gates(b, apart[0], per_key) if apart else Gates(b, b[:, per_key:], 2 * per_key)


def _project_kimi(
    shape: GatedDeltaNetShape, w: GpuDeltaNet, count: Tensor, s: GpuWorkspace
) -> tuple[Tensor, Tensor, Gates]:
    """Launches the products of s.y for Kimi. Returns qkv, z and the gates. q, k and v have separate matrices of
    different types, and a and z may take two products each."""
    delta = s.delta
    assert delta is not None
    assert delta.kimi is not None
    space = delta.kimi
    q, k, v, b, *gates = multiply_all(
        w.inputs, [width for _, width in shape.input_parts], s.y, count, s.projected, s.dense
    )
    torch.cat([q, k, v], dim=1, out=space.qkv)
    if space.second is None:
        a, z = gates
        return space.qkv, z, Gates(b, a, 1)
    x, outputs = space.second.low_rank, [space.second.a]
    if space.second.z is not None:
        outputs.append(space.second.z)
    for source, matrix, out in zip(gates, w.gates, outputs, strict=False):
        norm_rows(source, None, 0.0, count, x.x, x.codes, x.scales)
        multiply(matrix, x, count, out, s.dense)
    return space.qkv, outputs[1] if len(outputs) > 1 else gates[1], Gates(b, space.second.a, 1)


def first_of(sequences: StepSequences, count: int) -> StepSequences:
    """Returns the first `count` sequences."""
    s = sequences
    drafts = None if s.drafts is None else s.drafts.of_first(count)
    return StepSequences(s.first[:count], s.count[:count], s.slot[:count], s.row_sequence, drafts)
