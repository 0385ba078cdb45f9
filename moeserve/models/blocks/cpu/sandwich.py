"""A dense feed-forward and experts side by side, each between norms of its own, queued on the pool's stream:

x = (x + norm(norm(dense(norm(x))) + norm(experts(norm(x), routes of norm(x))))) * factor
"""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.models.blocks.cpu.lora import LayerAdapters, project
from moeserve.models.blocks.cpu.workspace import CpuWorkspace
from moeserve.models.interface import MoeShape
from moeserve.models.loading.cpu_weights import CpuMoe, CpuSandwich, CpuSharedExpert
from moeserve.models.sources.gguf import names


def mix_sandwiched(
    stream: CpuStream,
    w: CpuMoe,
    norms: CpuSandwich,
    shape: MoeShape,
    eps: float,
    n: int,
    space: CpuWorkspace,
    expert_token_counts: Tensor,
    adapters: LayerAdapters | None,
) -> None:
    """expert_token_counts: int64 [2, experts], see `CpuStream.experts`."""
    s = space.sandwich
    assert s is not None
    assert w.shared is not None
    assert shape.shared is not None
    stream.norm(space.x, w.norm, eps, n, space.y)
    _unrouted(stream, w.shared, shape, n, space, s.block, adapters)
    stream.norm(s.block, norms.shared_output, eps, n, s.sum)

    stream.norm(space.x, norms.router_input, eps, n, space.y)
    project(stream, space.y, n, w.router, [space.router_logits], adapters, (names.FFN_GATE_INP,))
    stream.route(space.router_logits, n, space.routing, shape.router, expert_scale=w.expert_scale)
    stream.norm(space.x, norms.experts_input, eps, n, space.y)
    e = w.experts
    stream.experts(
        e.gate, e.up, e.down, space.y, n, space.routing, space.h, expert_token_counts, s.block,
        activation=shape.activation, add=False,
        lora=None if adapters is None else adapters.experts(names.EXPERT_PARTS),
    )  # fmt: skip
    stream.add_norm(s.block, norms.experts_output, eps, n, s.sum.f32)
    stream.add_norm(s.sum.f32, norms.output, eps, n, space.x, factor=norms.factor)


def _unrouted(
    stream: CpuStream,
    w: CpuSharedExpert,
    shape: MoeShape,
    n: int,
    space: CpuWorkspace,
    out: Tensor,
    adapters: LayerAdapters | None,
) -> None:
    """out = what every token passes, as a mixture of one expert."""
    assert shape.shared is not None
    e, routing, h = w.experts, space.unrouted_routing, space.unrouted_h[w.experts.gate.rows]
    stream.shared_gate(space.y, n, w.gate, routing)
    stream.experts(
        e.gate, e.up, e.down, space.y, n, routing, h, None, out, activation=shape.shared.activation, add=False,
        lora=None if adapters is None else adapters.experts(shape.shared.parts),
    )  # fmt: skip
