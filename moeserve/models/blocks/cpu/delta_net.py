"""Computes x += output(norm(delta_rule(conv(qkv))) * silu(z)), with qkv, z, b and a projected from norm(x); queued on
the pool's stream.

Some models' output gate is sigmoid(z), among them Kimi Delta Attention. It may compute a (through f), and also z
(through g), by two products with a low-rank vector between them.
"""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.stream_operands import StateLayer
from moeserve.models.blocks.cpu.residual import add_product, read_residual
from moeserve.models.blocks.cpu.workspace import CpuBatch, CpuWorkspace
from moeserve.models.loading.cpu_weights import CpuDeltaNet
from moeserve.models.recurrence import GatedDeltaNetShape


def project_delta(stream: CpuStream, w: CpuDeltaNet, eps: float, n: int, space: CpuWorkspace) -> None:
    """Launches the products qkv, z, b and a of norm(x). eps: added to the mean square under the norm's root; n: rows
    of the step."""
    delta = space.delta
    assert delta is not None
    read_residual(stream, w.norm, eps, n, space)
    stream.linear(space.y, n, w.inputs, delta.inputs)
    # Converts f and g to the activation format of products.
    for source, low_rank, weights, out in zip(
        delta.inputs[-2:], delta.low_rank, w.gates, delta.gates, strict=False
    ):
        stream.gelu_gate(None, source, 0, n, low_rank)
        stream.linear(low_rank, n, weights, [out])


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
    """Launches the rest of a gated delta net block after `project_delta`: convolution, recurrence, norm and output
    projection, whose result goes where `block_output` says. Advances `state`. pending: this layer's draft record, if
    rows may have drafts, else None; eps: added to the mean square under the norm's root."""
    n, delta = batch.n, space.delta
    assert delta is not None
    assert batch.states is not None
    qkv: Tensor | tuple[Tensor, Tensor, Tensor]
    a: Tensor | None
    if shape.heads.is_kimi:
        q, k, v, b = delta.inputs[:4]
        qkv, (a, z) = (q, k, v), [*delta.gates, *delta.inputs[4 + len(delta.gates) :]]
    else:
        qkv, z, b = delta.inputs[:3]
        a = None if shape.merged_gates else delta.inputs[3]
    stream.delta_net(qkv, z, b, a, w.parameters, eps, shape.heads, state, batch.states, n, delta.out, pending)
    add_product(stream, delta.out, n, w.output, space)
