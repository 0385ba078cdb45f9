"""Some experts for the routes of all rows, few or many, as launches on the current stream; and what a layer leaves."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.experts.large_batch import large_batch_down, large_batch_up
from moeserve.kernels.experts.op import BlockWorkspace, align_routes, experts_down, experts_up
from moeserve.kernels.experts.small_batch import small_batch_down, small_batch_up
from moeserve.kernels.linear.op import Gated, RouteBlocks
from moeserve.models.blocks.gpu.lora_products import ExpertAdapters
from moeserve.models.blocks.gpu.workspace import GpuWorkspace
from moeserve.models.interface import MoeShape
from moeserve.models.loading.gpu_weights import GpuExperts, plane_tensors


class PendingSum(NamedTuple):
    """What a layer's experts have left to be added to x: parts by their weights, those whose id is not below 0 (None:
    all, as they are), and the pool's sum."""

    parts: Tensor | None
    weights: Tensor | None
    ids: Tensor | None
    pool_sum: Tensor | None


class ExpertRun(NamedTuple):
    """Some experts for the routes of all rows, and where what they compute goes."""

    y: GpuActivations  # what they read
    experts: GpuExperts
    hidden: int
    width: int
    ids: Tensor  # int32 [rows, routes]: places in `experts`, below 0: elsewhere
    weights: Tensor  # float32 [rows, routes]
    h: GpuActivations
    blocks: BlockWorkspace
    parts: Tensor  # [rows, routes, hidden] a part for every route, or of few rows [rows, 1, hidden] their sum
    options: Gated
    adapters: ExpertAdapters | None

    def launch(self, s: GpuWorkspace, count: Tensor, *, adds: bool) -> None:
        """adds: where a token has one part, it holds others' sum already."""
        gate, up, down = self.experts.gate, self.experts.up, self.experts.down
        bias = None if self.experts.biases is None else self.experts.biases[2]
        matrices = (plane_tensors(gate), int(gate.type), plane_tensors(up), int(up.type), self.hidden)
        of_down = (plane_tensors(down), int(down.type), self.width)
        y, h, b, options = self.y, self.h, self.blocks, self.options
        if s.is_small_batch:
            h = GpuActivations(None, h.codes, h.scales) if down.quantised else GpuActivations(h.x, None, None)
            mine = None if self.adapters is None else self.adapters.of_routes(self.ids, None)
            if mine is not None:
                options = mine.gated(y, self.width, options)
            small_batch_up(
                y.x, y.codes, y.scales, *matrices, self.ids, h.x, h.codes, h.scales, options=options
            )
            small_batch_down(
                h.x, h.codes, h.scales, *of_down, self.ids, self.weights, count, self.parts[:, 0], adds=adds,
                bias=bias,
            )  # fmt: skip
            if mine is not None:
                mine.add_down_sum(h, self.weights, self.parts[:, 0])
            return
        assert y.x is not None
        assert h.x is not None
        align_routes(self.ids, count, gate.experts, b.expert, b.routes)
        mine = None if self.adapters is None else self.adapters.of_routes(self.ids, b)
        if mine is not None:
            options = mine.gated(y, self.width, options)
        if b.is_large_batch and s.unpacked is not None:
            routing = RouteBlocks(b.expert, b.routes)
            large_batch_up(y.x, *matrices, routing, self.ids.shape[1], h.x, s.unpacked, options=options)
            large_batch_down(h.x, *of_down, routing, self.parts, s.unpacked, bias=bias)
        else:
            experts_up(y.x, *matrices, b.expert, b.routes, self.ids.shape[1], h.x, options=options)
            experts_down(h.x, *of_down, b.expert, b.routes, count, self.parts, bias=bias)
        if mine is not None:
            mine.add_down(h, self.parts)


def gated_product(shape: MoeShape, experts: GpuExperts) -> Gated:
    """What joins gate and up of these experts, with their biases where they have some."""
    if experts.biases is None:
        return Gated(shape.activation)
    gate, up, _ = experts.biases
    return Gated(shape.activation, gate, up)
