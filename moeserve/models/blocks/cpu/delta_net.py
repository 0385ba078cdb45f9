"""x += output(norm(delta rule(conv(qkv))) * silu(z)) with qkv, z, b, a of norm(x), queued on the pool's stream."""

from __future__ import annotations

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.stream_operands import StateLayer
from moeserve.models.blocks.cpu.workspace import CpuBatch, CpuWorkspace
from moeserve.models.interface import GatedDeltaNetShape
from moeserve.models.loading.cpu_weights import CpuDeltaNet


def recur(
    stream: CpuStream,
    w: CpuDeltaNet,
    shape: GatedDeltaNetShape,
    eps: float,
    state: StateLayer,
    batch: CpuBatch,
    space: CpuWorkspace,
) -> None:
    n, delta = batch.n, space.delta
    assert delta is not None
    assert batch.states is not None
    stream.norm(space.x, w.norm, eps, n, space.y)
    stream.linear(space.y, n, w.inputs, delta.inputs)
    qkv, z, b = delta.inputs[:3]
    a = None if shape.merged_gates else delta.inputs[3]
    stream.delta_net(qkv, z, b, a, w.parameters, eps, shape.heads, state, batch.states, n, delta.out)
    stream.linear(delta.out, n, w.output, [space.x], add=True)
