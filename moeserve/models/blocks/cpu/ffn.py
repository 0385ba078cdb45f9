"""The feed-forward of y = norm(x), on the pool's stream. In a parallel layer the token mixer has already computed y.

A mixture of experts gives the weighted sum over the chosen experts of down(activation(gate y, up y)), plus the
shared expert's output. A layer without experts has a single feed-forward. The result is added to `out` or
overwrites it.
"""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.stream_operands import Activations, DiskLayer
from moeserve.models.blocks.cpu.disk_experts import CpuDiskExperts
from moeserve.models.blocks.cpu.lora import LayerAdapters, project
from moeserve.models.blocks.cpu.residual import read_residual
from moeserve.models.blocks.cpu.workspace import CpuWorkspace
from moeserve.models.feed_forward import DenseFfnShape, MoeShape, SharedExpert
from moeserve.models.loading.cpu_weights import CpuDenseFfn, CpuMoe, CpuSharedExpert
from moeserve.models.sources.gguf import names


def mix(
    stream: CpuStream,
    w: CpuMoe,
    shape: MoeShape,
    eps: float,
    n: int,
    space: CpuWorkspace,
    expert_token_counts: Tensor,
    adapters: LayerAdapters | None,
    out: Tensor,
    *,
    add: bool,
    token_ids: Tensor,
    disk: CpuDiskExperts | None = None,
    index: int = 0,
) -> None:
    """Launches router, experts and shared expert. expert_token_counts: int64 [2, experts], see `CpuStream.experts`.
    token_ids: int32 [n]; disk: None if all experts are in RAM; index: the layer's index. eps: added to the mean square
    under the norm's root."""
    if w.norm is not None:
        read_residual(stream, w.norm, eps, n, space)
    project(stream, space.y, n, w.router, [space.router_logits], adapters, (names.FFN_GATE_INP,))
    by_token = None if w.by_token is None else (w.by_token, token_ids)
    stream.route(space.router_logits, n, space.routing, shape.router, bias=w.choice_bias, by_token=by_token)
    on_disk = None if disk is None else disk.layer(index, n, space)
    if not w.latent:
        run_experts(stream, w, shape, n, space, expert_token_counts, adapters, out, add=add, disk=on_disk)
    else:
        assert space.latent_experts is not None
        into, from_experts = w.latent
        product, y = space.latent_experts.product, space.latent_experts.converted
        stream.linear(space.y, n, into, [product])
        stream.gelu_gate(None, product, 0, n, y)
        counts = expert_token_counts
        run_experts(stream, w, shape, n, space, counts, adapters, product, add=False, disk=on_disk, y=y)
        if w.latent_norm is None:
            stream.gelu_gate(None, product, 0, n, y)
        else:
            stream.norm(product, w.latent_norm, eps, n, y)
        stream.linear(y, n, from_experts, [out], add=add)
    if w.shared is not None:
        assert shape.shared is not None
        run_unrouted(stream, w.shared, shape.shared, n, space, adapters, shape.shared.parts, out, add=True)


def feed_forward(
    stream: CpuStream,
    w: CpuDenseFfn,
    shape: DenseFfnShape,
    eps: float,
    n: int,
    space: CpuWorkspace,
    adapters: LayerAdapters | None,
    out: Tensor,
    *,
    add: bool,
) -> None:
    """Launches the feed-forward of a layer without experts: out = its output, float32 [n, hidden], or (add) out += it.
    eps: added to the mean square under the norm's root; n: rows of the step."""
    if w.norm is not None:
        read_residual(stream, w.norm, eps, n, space)
    run_unrouted(stream, w.expert, shape, n, space, adapters, shape.parts, out, add=add)


def run_experts(
    stream: CpuStream,
    w: CpuMoe,
    shape: MoeShape,
    n: int,
    space: CpuWorkspace,
    expert_token_counts: Tensor,
    adapters: LayerAdapters | None,
    out: Tensor,
    *,
    add: bool,
    disk: DiskLayer | None,
    y: Activations | None = None,
) -> None:
    """Launches the experts that space.routing has chosen: out = their weighted sum, float32 [n, hidden], or (add) out
    += it. y: their input; None: space.y. disk: the layer's experts on disk; None: all are in RAM. n: rows of the
    step."""
    e, b = w.experts, w.experts.biases
    stream.experts(
        e.gate, e.up, e.down, space.y if y is None else y, n, space.routing, space.h, expert_token_counts, out,
        activation=shape.activation, limit=shape.limit, alpha=shape.alpha, weighs_input=shape.weighs_input, add=add,
        gate_bias=None if b is None else b.gate,
        up_bias=None if b is None else b.up,
        down_bias=None if b is None else b.down,
        lora=None if adapters is None else adapters.experts(shape.parts),
        disk=disk,
    )  # fmt: skip


def run_unrouted(
    stream: CpuStream,
    w: CpuSharedExpert,
    shape: SharedExpert | DenseFfnShape,
    n: int,
    space: CpuWorkspace,
    adapters: LayerAdapters | None,
    parts: tuple[str, ...],
    out: Tensor,
    *,
    add: bool,
) -> None:
    """Launches a feed-forward that all tokens pass through, down(activation(gate y, up y)), as a mixture of one expert:
    out = the result, float32 [n, hidden], or (add) out += it. A shared expert's result is multiplied by sigmoid(w.gate
    . y) if it has such a gate. n: rows of the step."""
    e, routing, h = w.experts, space.unrouted_routing, space.unrouted_h[w.experts.gate.rows]
    stream.shared_gate(space.y, n, w.gate, routing)
    stream.experts(
        e.gate, e.up, e.down, space.y, n, routing, h, None, out,
        activation=shape.activation, limit=shape.limit, alpha=shape.alpha, add=add,
        lora=None if adapters is None else adapters.experts(parts),
    )  # fmt: skip
