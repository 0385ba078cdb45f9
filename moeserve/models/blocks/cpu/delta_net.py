"""x += output(norm(delta rule(conv(qkv))) * silu(z)) with qkv, z, b, a of norm(x), queued on the pool's stream."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.stream_operands import StateLayer
from moeserve.models.blocks.cpu.workspace import CpuBatch, CpuWorkspace
from moeserve.models.loading.cpu_weights import CpuDeltaNet
from moeserve.models.recurrence import GatedDeltaNetShape


def project_delta(stream: CpuStream, w: CpuDeltaNet, eps: float, n: int, space: CpuWorkspace) -> None:
    """qkv, z, b, a: what of it needs nothing of a step but x."""
    assert space.delta is not None
    stream.norm(space.x, w.norm, eps, n, space.y)
    stream.linear(space.y, n, w.inputs, space.delta.inputs)


def recur(
    stream: CpuStream,
    w: CpuDeltaNet,
    shape: GatedDeltaNetShape,
    eps: float,
    state: StateLayer,
    batch: CpuBatch,
    space: CpuWorkspace,
    pending: Tensor | None = None,
) -> None:
    """Behind `project_delta`. pending: of this layer, where rows may have drafts."""
    n, delta = batch.n, space.delta
    assert delta is not None
    assert batch.states is not None
    qkv, z, b = delta.inputs[:3]
    a = None if shape.merged_gates else delta.inputs[3]
    stream.delta_net(qkv, z, b, a, w.parameters, eps, shape.heads, state, batch.states, n, delta.out, pending)
    stream.linear(delta.out, n, w.output, [space.x], add=True)
