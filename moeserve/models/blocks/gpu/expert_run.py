"""Launches a set of experts for all rows' routes, with the kernels that suit the number of rows; and the type of a
layer's pending output."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.experts.integers import down_tile, has_gated_integers, integers_down, integers_up
from moeserve.kernels.experts.large_batch import large_batch_down, large_batch_up
from moeserve.kernels.experts.op import BlockWorkspace, align_routes, experts_down, experts_up
from moeserve.kernels.experts.quads import quad_order, quads_down, quads_up, takes_quads
from moeserve.kernels.experts.small_batch import small_batch_down, small_batch_up
from moeserve.kernels.linear.integers import integer_order
from moeserve.kernels.linear.large_batch import UnpackScratch
from moeserve.kernels.linear.operands import Gated, RouteBlocks
from moeserve.models.blocks.gpu.lora_products import ExpertAdapters
from moeserve.models.blocks.gpu.workspace import GpuWorkspace
from moeserve.models.feed_forward import MoeShape
from moeserve.models.loading.gpu_weights import GpuExperts, plane_tensors


class PendingSum(NamedTuple):
    """A layer's expert outputs that are still to be added to x: the sum of `parts` [rows, routes, hidden] times
    `weights` float32 [rows, routes], plus the CPU pool's sum [rows, hidden]. Parts whose id is negative are left out.
    ids None: all parts count, unweighted."""

    parts: Tensor | None
    weights: Tensor | None
    ids: Tensor | None
    pool_sum: Tensor | None


class ExpertRun(NamedTuple):
    """The arguments of one launch of experts: the experts, the routes of all rows, and the input and output buffers."""

    y: GpuActivations  # the experts' input
    experts: GpuExperts
    hidden: int
    width: int
    ids: Tensor  # int32 [rows, routes]: indices in `experts`; negative: not among them
    weights: Tensor  # float32 [rows, routes]
    h: GpuActivations
    blocks: BlockWorkspace
    parts: Tensor  # [rows, routes, hidden]: one part per route; for few rows [rows, 1, hidden]: their sum
    options: Gated
    adapters: ExpertAdapters | None
    # y by route, in the order of the columns of gate and up; None: they have no order.
    gathered: GpuActivations | None = None

    @property
    def _gate_and_up(self) -> tuple[list[Tensor], int, list[Tensor], int, int]:
        """Both matrices as kernels take them: planes, types and columns."""
        gate, up = self.experts.gate, self.experts.up
        return plane_tensors(gate), int(gate.type), plane_tensors(up), int(up.type), self.hidden

    @property
    def _down(self) -> tuple[list[Tensor], int, int]:
        return plane_tensors(self.experts.down), int(self.experts.down.type), self.width

    @property
    def _input(self) -> tuple[GpuActivations, int]:
        """Returns the tensor that gate and up read, and how many routes share one of its rows."""
        return (self.y, self.ids.shape[1]) if self.gathered is None else (self.gathered, 1)

    def launch(self, s: GpuWorkspace, count: Tensor, *, adds: bool) -> None:
        """Launches the experts. adds: whether, with few rows, the results are added to the present contents of
        `parts`. count: int32 [1] on the device, the number of valid rows."""
        down, matrices, of_down = self.experts.down, self._gate_and_up, self._down
        bias = None if self.experts.biases is None else self.experts.biases[2]
        y, h, b, options = self.y, self.h, self.blocks, self.options
        x, x_top_k = self._input
        if s.is_small_batch:
            h = GpuActivations(None, h.codes, h.scales) if down.quantised else GpuActivations(h.x, None, None)
            mine = None if self.adapters is None else self.adapters.of_routes(self.ids, None)
            if mine is not None:
                options = mine.gated(y, self.width, options)
            small_batch_up(
                x.x, x.codes, x.scales, *matrices, self.ids, h.x, h.codes, h.scales, options=options, x_top_k=x_top_k
            )  # fmt: skip
            small_batch_down(
                h.x, h.codes, h.scales, *of_down, self.ids, self.weights, count, self.parts[:, 0], adds=adds,
                bias=bias,
            )  # fmt: skip
            if mine is not None:
                mine.add_down_sum(h, self.weights, self.parts[:, 0])
            return
        assert x.x is not None
        assert h.x is not None
        unpacked = self._unpacked_experts(s)
        if unpacked is None and self._takes_integers(s):
            self._launch_integers(s, count, bias)
            return
        if unpacked is None and self._takes_quads(s):
            self._launch_quads(s, count)
            return
        scratch = s.unpack_scratch if b.is_large_batch else None
        if unpacked is not None:
            b, scratch = unpacked
        elif self._looks_up(s):
            assert s.books is not None
            b, scratch = s.books
        self._align(RouteBlocks(b.expert, b.routes), count)
        mine = None if self.adapters is None else self.adapters.of_routes(self.ids, b)
        if mine is not None:
            options = mine.gated(y, self.width, options)
        if scratch is not None:
            routing = RouteBlocks(b.expert, b.routes)
            unpacked_up, unpacked_down = self.experts.unpacked or (None, None)
            large_batch_up(
                x.x, *matrices, routing, x_top_k, h.x, scratch, options=options, unpacked=unpacked_up
            )
            large_batch_down(h.x, *of_down, routing, self.parts, scratch, bias=bias, unpacked=unpacked_down)
        else:
            experts_up(x.x, *matrices, b.expert, b.routes, x_top_k, h.x, options=options)
            experts_down(h.x, *of_down, b.expert, b.routes, count, self.parts, bias=bias)
        if mine is not None:
            mine.add_down(h, self.parts)

    def _unpacked_experts(self, s: GpuWorkspace) -> tuple[BlockWorkspace, UnpackScratch] | None:
        """Returns the blocks and the scratch for unpacked experts; None: the layer has none, or the step is too
        small."""
        is_routed = self.blocks is s.blocks  # `s.unpacked_experts` has blocks for all experts
        return s.unpacked_experts if is_routed and self.experts.unpacked is not None else None

    def _takes_integers(self, s: GpuWorkspace) -> bool:
        """Returns whether gate and up have weights as integers."""
        gate, up = self.experts.gate, self.experts.up
        return s.integers is not None and self._is_plain(s) and has_gated_integers(gate, up, self.options)

    def _launch_integers(self, s: GpuWorkspace, count: Tensor, bias: Tensor | None) -> None:
        e, w, h, b, top_k = self.experts, s.integers, self.h.x, self.blocks, self.ids.shape[1]
        assert w is not None
        assert h is not None
        assert self.y.x is not None
        self._align(w.routing, count)
        integer_order(self.y.x, count, w.x)
        integers_up(w.x, e.gate, e.up, w.routing, top_k, h, tile=w.method.up)
        if bias is None and w.takes_down(e.down):
            integer_order(h, count, w.h, top_k)
            integers_down(w.h, e.down, w.routing, self.parts, tile=down_tile(e.down, w.method))
            return
        quads = s.quads if takes_quads(e.down) else None
        routing = (
            RouteBlocks(b.expert, b.routes) if quads is None else RouteBlocks(quads.expert, quads.routes)
        )
        if routing.routes.shape == w.routing.routes.shape:
            routing = w.routing
        else:
            self._align(routing, count)
        if quads is not None:
            ordered = w.h.x.view(h.dtype).view(-1)[: h.numel()].view(h.shape)
            quad_order(h, count, ordered, top_k)
            quads_down(ordered, *self._down, routing, self.parts, tile=quads.method.down, bias=bias)
        else:
            experts_down(h, *self._down, routing.expert, routing.routes, count, self.parts, bias=bias)

    def _align(self, routing: RouteBlocks, count: Tensor) -> None:
        experts, counts = self.experts.gate.experts, self.blocks.counts
        align_routes(self.ids, count, experts, routing.expert, routing.routes, counts)

    def _looks_up(self, s: GpuWorkspace) -> bool:
        """Returns whether the weights are unpacked before the products although the step is small, because they are
        looked up in codebooks."""
        is_routed = self.blocks is s.blocks  # `s.books` has blocks for all experts
        planes = (self.experts.gate, self.experts.up, self.experts.down)
        return s.books is not None and is_routed and any(p.type.plane_book is not None for p in planes)

    def _takes_quads(self, s: GpuWorkspace) -> bool:
        """Returns whether the products use quad order."""
        e = self.experts
        return s.quads is not None and self._is_plain(s) and takes_quads(e.gate, e.up, e.down)

    def _is_plain(self, s: GpuWorkspace) -> bool:
        """Returns whether the products may reorder activations. They may not with adapters, which need the ordinary
        layout, nor with gathered inputs: reordered activations have one row per token, gathered ones one per route."""
        is_routed = self.blocks is s.blocks  # `s.integers` and `s.quads` have blocks for all experts
        return is_routed and self.adapters is None and self.gathered is None

    def _launch_quads(self, s: GpuWorkspace, count: Tensor) -> None:
        e, q, h = self.experts, s.quads, self.h.x
        assert q is not None
        assert h is not None
        assert self.y.x is not None
        bias = None if e.biases is None else e.biases[2]
        routing, top_k = RouteBlocks(q.expert, q.routes), self.ids.shape[1]
        self._align(routing, count)
        quad_order(self.y.x, count, q.x)
        quads_up(
            q.x, plane_tensors(e.gate), int(e.gate.type), plane_tensors(e.up), int(e.up.type), self.hidden, routing,
            top_k, h, tile=q.method.up, options=self.options,
        )  # fmt: skip
        quads_down(
            h, plane_tensors(e.down), int(e.down.type), self.width, routing, self.parts, tile=q.method.down, bias=bias
        )  # fmt: skip


def gated_product(shape: MoeShape, experts: GpuExperts) -> Gated:
    """Returns how gate and up of these experts are combined, with their biases if any."""
    if experts.biases is None:
        return Gated(shape.activation, limit=shape.limit, alpha=shape.alpha)
    gate, up, _ = experts.biases
    return Gated(shape.activation, gate, up, limit=shape.limit, alpha=shape.alpha)
