"""A dense feed-forward and experts in parallel, each between its own norms, on the pool's stream:

norm(dense(norm(x))) + norm(experts(norm(x), routes of norm(x)))
"""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.models.blocks.cpu.disk_experts import CpuDiskExperts
from moeserve.models.blocks.cpu.ffn import run_experts, run_unrouted
from moeserve.models.blocks.cpu.lora import LayerAdapters, project
from moeserve.models.blocks.cpu.residual import read_residual
from moeserve.models.blocks.cpu.workspace import CpuWorkspace
from moeserve.models.feed_forward import MoeShape
from moeserve.models.loading.cpu_weights import CpuMoe, CpuParts
from moeserve.models.sources.gguf import names


def mix_parts(
    stream: CpuStream,
    w: CpuMoe,
    norms: CpuParts,
    shape: MoeShape,
    eps: float,
    n: int,
    space: CpuWorkspace,
    expert_token_counts: Tensor,
    adapters: LayerAdapters | None,
    disk: CpuDiskExperts | None,
    index: int,
) -> Tensor:
    """Launches both parts. Returns the tensor with the sum. expert_token_counts: int64 [2, experts], see
    `CpuStream.experts`. disk, index: see `mix`. eps: added to the mean square under the norm's root; n: rows of the
    step."""
    s = space.sandwich
    assert s is not None
    assert w.shared is not None
    assert shape.shared is not None
    assert w.norm is not None
    read_residual(stream, w.norm, eps, n, space)
    run_unrouted(stream, w.shared, shape.shared, n, space, adapters, shape.shared.parts, s.block, add=False)
    stream.norm(s.block, norms.shared_output, eps, n, s.sum)

    stream.norm(space.x, norms.router_input, eps, n, space.y)
    project(stream, space.y, n, w.router, [space.router_logits], adapters, (names.FFN_GATE_INP,))
    stream.route(space.router_logits, n, space.routing, shape.router, expert_scale=w.expert_scale)
    stream.norm(space.x, norms.experts_input, eps, n, space.y)
    on_disk = None if disk is None else disk.layer(index, n, space)
    run_experts(stream, w, shape, n, space, expert_token_counts, adapters, s.block, add=False, disk=on_disk)
    stream.add_norm(s.block, norms.experts_output, eps, n, s.sum.f32)
    return s.sum.f32
