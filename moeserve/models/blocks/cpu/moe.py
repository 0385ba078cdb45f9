"""x += sum of the chosen experts' down(silu(gate y) * up y) with y = norm(x), and of the shared expert's, queued on the
pool's stream."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.blocks.cpu.workspace import CpuWorkspace
from moeserve.models.loading.cpu_weights import CpuMoe, CpuSharedExpert


def mix(
    stream: CpuStream,
    w: CpuMoe,
    router: RouterOptions,
    eps: float,
    n: int,
    space: CpuWorkspace,
    expert_token_counts: Tensor,
) -> None:
    """expert_token_counts: int64 [2, experts], see `CpuStream.experts`."""
    e = w.experts
    stream.norm(space.x, w.norm, eps, n, space.y)
    stream.linear(space.y, n, w.router, [space.router_logits])
    stream.route(space.router_logits, n, space.routing, router)
    stream.experts(e.gate, e.up, e.down, space.y, n, space.routing, space.h, expert_token_counts, space.x)
    if w.shared is not None:
        _add_shared_expert(stream, w.shared, n, space)


def _add_shared_expert(stream: CpuStream, w: CpuSharedExpert, n: int, space: CpuWorkspace) -> None:
    """x += sigmoid(gate . y) * down(silu(gate y) * up y), as a mixture of one expert that every token is routed to."""
    e = w.experts
    assert space.shared_routing is not None
    assert space.shared_h is not None
    stream.shared_gate(space.y, n, w.gate, space.shared_routing)
    stream.experts(e.gate, e.up, e.down, space.y, n, space.shared_routing, space.shared_h, None, space.x)
