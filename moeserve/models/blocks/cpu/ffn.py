"""x += the feed-forward of y = norm(x), queued on the pool's stream: the sum of the chosen experts'
down(activation(gate y, up y)) and of the shared expert's, or the only one's of a layer without experts."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.models.blocks.cpu.lora import LayerAdapters, project
from moeserve.models.blocks.cpu.workspace import CpuWorkspace
from moeserve.models.interface import MoeShape
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
) -> None:
    """expert_token_counts: int64 [2, experts], see `CpuStream.experts`."""
    e, b = w.experts, w.experts.biases
    stream.norm(space.x, w.norm, eps, n, space.y)
    project(stream, space.y, n, w.router, [space.router_logits], adapters, (names.FFN_GATE_INP,))
    stream.route(space.router_logits, n, space.routing, shape.router, bias=w.choice_bias)
    stream.experts(
        e.gate, e.up, e.down, space.y, n, space.routing, space.h, expert_token_counts, space.x,
        activation=shape.activation,
        gate_bias=None if b is None else b.gate,
        up_bias=None if b is None else b.up,
        down_bias=None if b is None else b.down,
        lora=None if adapters is None else adapters.experts(names.EXPERT_PARTS),
    )  # fmt: skip
    if w.shared is not None:
        _add_unrouted(stream, w.shared, n, space, adapters, names.SHARED_PARTS)


def feed_forward(
    stream: CpuStream, w: CpuDenseFfn, eps: float, n: int, space: CpuWorkspace, adapters: LayerAdapters | None
) -> None:
    """Queues the feed-forward of a layer without experts."""
    stream.norm(space.x, w.norm, eps, n, space.y)
    _add_unrouted(stream, w.expert, n, space, adapters, names.FFN_PARTS)


def _add_unrouted(
    stream: CpuStream,
    w: CpuSharedExpert,
    n: int,
    space: CpuWorkspace,
    adapters: LayerAdapters | None,
    parts: tuple[str, ...],
) -> None:
    """x += sigmoid(gate . y) * down(silu(gate y) * up y), as a mixture of one expert that every token is routed to."""
    e, routing, h = w.experts, space.unrouted_routing, space.unrouted_h[w.experts.gate.rows]
    stream.shared_gate(space.y, n, w.gate, routing)
    lora = None if adapters is None else adapters.experts(parts)
    stream.experts(e.gate, e.up, e.down, space.y, n, routing, h, None, space.x, lora=lora)
