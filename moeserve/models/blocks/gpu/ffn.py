"""The feed-forwards of all layers, as launches on the current stream.

The GPU computes the experts in its memory while the CPU pool computes those in RAM (`kernels/handoff`); or RAM experts
are streamed to the GPU. A layer without experts has one feed-forward, treated like a shared expert. A layer's output is
left in parts. The next norm adds them to x; sandwiched layers normalise them first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.experts.op import shared_gate
from moeserve.kernels.experts.sum_parts import sum_parts
from moeserve.kernels.experts.weigh_input import weigh_input
from moeserve.kernels.handoff import ExpertHandoff
from moeserve.kernels.launch import is_compiling_ahead
from moeserve.kernels.linear.op import Gated
from moeserve.kernels.norm.op import add_norm, sandwich_sum
from moeserve.kernels.routing.op import route, select_streamed_routes
from moeserve.models.blocks.gpu.dense_rows import multiply_dense, takes_dense_products
from moeserve.models.blocks.gpu.expert_run import ExpertRun, PendingSum, gated_product
from moeserve.models.blocks.gpu.ffn_inputs import GpuFfnInputs
from moeserve.models.blocks.gpu.forced_routing import ForcedRouting
from moeserve.models.blocks.gpu.linear import in_order
from moeserve.models.blocks.gpu.lora_products import ExpertAdapters, LayerAdapters
from moeserve.models.blocks.gpu.norms_behind import added_behind_norms
from moeserve.models.blocks.gpu.residual import add_block
from moeserve.models.blocks.gpu.sums import GpuSums
from moeserve.models.blocks.gpu.workspace import GpuBatch, GpuWorkspace, Routes
from moeserve.models.interface import ModelShape
from moeserve.models.loading.expert_stream import ExpertStream
from moeserve.models.loading.gpu_weights import (
    GpuDenseFfn,
    GpuExperts,
    GpuInput,
    GpuLayer,
    GpuMoe,
    GpuSharedExpert,
    GpuStreams,
    norm_weight,
)
from moeserve.models.observer import LayerRouting
from moeserve.models.sources.gguf import names


class GpuFfnBlock:
    """Owns `inputs`, `expert_token_counts` and, for the current step, which experts are streamed."""

    def __init__(
        self,
        shape: ModelShape,
        layers: Sequence[GpuLayer],
        device: torch.device,
        handoff: ExpertHandoff | None,
        expert_stream: ExpertStream | None,
        prefill: Sequence[str] | None,
        sums: GpuSums,
        forced_routing: ForcedRouting | None = None,
        num_in_ram: Sequence[int] | None = None,
    ) -> None:
        """layers: the last ones of `shape`. handoff: to the CPU pool, if it has experts. expert_stream: streams
        experts from RAM, in layers whose `prefill` is not "cpu". sums: over the GPUs of a tensor-parallel group.
        num_in_ram: number of experts that the pool has, by layer; None: all that are not on this GPU."""
        self._sums = sums
        self._forced_routing = forced_routing
        self._eps = shape.rms_eps
        self._centered = shape.centers_norms
        self._hidden = shape.hidden_size
        self._shapes = shape.layers[shape.num_layers - len(layers) :]
        self._layers = [layer.ffn for layer in layers]
        self.inputs = GpuFfnInputs(self._shapes, self._layers, sums, shape.rms_eps)
        self._expert_maps = [layer.expert_map for layer in layers]
        self._handoff = handoff
        self._expert_stream = expert_stream
        # Per layer, placement.Prefill: "cpu" never streams, "cuda" streams whenever there is a prompt.
        self._prefill = ["cpu"] * len(layers) if expert_stream is None or prefill is None else list(prefill)
        elsewhere = [0 if m is None or handoff is None else int((m < 0).sum()) for m in self._expert_maps]
        self._num_in_ram = elsewhere if num_in_ram is None else list(num_in_ram)
        # For the last step: number of streamed experts per layer, and whether the pool had any to compute.
        self._streamed = [0] * len(layers)
        self._pool_works = False
        # int64 [layers, experts]: tokens routed to each expert since start-up.
        self.expert_token_counts = torch.zeros(
            len(layers), shape.num_experts, dtype=torch.int64, device=device
        )

    @property
    def can_stream(self) -> bool:
        return self._expert_stream is not None

    def streams(self, batch: GpuBatch) -> bool:
        """Returns whether the step streams experts from RAM to the GPU."""
        return any(self._to_stream(layer, batch) for layer in range(len(self._layers)))

    def begin(self, batch: GpuBatch | None) -> None:
        """Starts the host's work for experts in RAM before a step or its replay (None); not part of a graph."""
        self._streamed = [0 if batch is None else self._to_stream(i, batch) for i in range(len(self._layers))]
        if any(self._streamed):
            assert self._expert_stream is not None
            self._expert_stream.begin(self._streamed)
        self._pool_works = self._handoff is not None and self._streamed != self._num_in_ram
        if self._pool_works and not is_compiling_ahead():
            assert self._handoff is not None
            self._handoff.begin()

    def check(self) -> None:
        """Call it after a step. Raises HandoffError if the CPU failed; the step's results are then invalid."""
        if self._handoff is not None:
            self._handoff.check()

    def pool_reads(self, layers: npt.NDArray[np.bool_]) -> int:
        """Returns how many experts of these layers the pool has read since start-up."""
        return 0 if self._handoff is None else self._handoff.expert_reads(layers)

    def forget_counts(self) -> None:
        """Zeroes the expert counts, on the GPU and in RAM."""
        self.expert_token_counts.zero_()
        if self._handoff is not None:
            for layer in range(len(self._layers)):
                self._handoff.expert_token_counts(layer).zero_()

    def mix(
        self, index: int, s: GpuWorkspace, batch: GpuBatch, adapters: LayerAdapters | None = None
    ) -> None:
        """Launches a layer's feed-forward. Reads s.x and s.output (attention's output); its result is `pending`."""
        count = batch.count
        ffn = self._layers[index]
        if isinstance(ffn, GpuDenseFfn):
            if ffn.norm is not None:
                self.inputs.norm(index, ffn.norm, s, count)
            changed = adapters is not None and adapters.change(names.FFN_PARTS)
            if takes_dense_products(ffn.expert.experts, s) and not changed:
                out, form = self._routes(index, s).parts[:, 0], self._unrouted_gated(index).form
                multiply_dense(ffn.expert, s, count, out, form)
            else:
                self._add_unrouted(index, ffn.expert, s, count, adapters, names.FFN_PARTS)
        elif ffn is not None:
            self._mix_experts(index, ffn, s, count, batch.token_ids, adapters)
        if self._sums.sums_ffn(index):
            self._sum_over_gpus(index, s, count)

    def _mix_experts(
        self,
        index: int,
        ffn: GpuMoe,
        s: GpuWorkspace,
        count: Tensor,
        token_ids: Tensor,
        adapters: LayerAdapters | None,
    ) -> None:
        shape = self._shapes[index].moe
        assert shape is not None
        self.inputs.router(index, ffn, s, count)
        if adapters is not None:
            exact = GpuActivations(s.router_input, None, None)
            adapters.add(exact, (names.FFN_GATE_INP,), [s.router_logits])
        forced, logits = self._forced_routing, s.router_logits
        if forced is not None:
            logits = forced.logits(index, logits)
        routes = self._routes(index, s)
        ids, weights = routes.expert_ids[:, : shape.top_k], routes.weights[:, : shape.top_k]
        local = None if ffn.expert_map is None else routes.local_expert_ids[:, : shape.top_k]
        route(
            logits, ffn.expert_map, count, ids, local, weights, self.expert_token_counts[index],
            options=shape.router, bias=ffn.choice_bias, expert_scale=ffn.expert_scale,
            by_token=None if ffn.by_token is None else (ffn.by_token, token_ids),
        )  # fmt: skip
        if shape.weighs_input:
            assert s.input_weights is not None
            weigh_input(s.router_input, weights, count, self.inputs.of_experts(index, s), s.input_weights)
        if local is None:
            assert ffn.experts is not None
            mine = None if adapters is None else adapters.experts(names.EXPERT_PARTS)
            gathered = self._gathered(index, ffn, ids, s, count)
            self._run_experts(index, ffn.experts, ids, s, count, adapters=mine, gathered=gathered)
        else:
            self._share_experts(index, ffn, local, s, count)
        if ffn.shared is not None:
            self._add_unrouted(index, ffn.shared, s, count, adapters, names.SHARED_PARTS)

    def add_and_norm(
        self,
        index: int,
        s: GpuWorkspace,
        weight: GpuInput,
        count: Tensor,
        y: GpuActivations,
        rows: Tensor | None,
        exact: Tensor | None = None,
    ) -> None:
        """Launches x += pending output of layer `index`, and y = norm of that, or that itself. With `rows`, only for
        these rows, and x stays unchanged. exact: `GpuFfnInputs.exact` of the next layer."""
        if isinstance(weight, GpuStreams):
            assert rows is None  # the head reads streams that are complete
            self.inputs.read_streams(weight, self.pending(index, s), s, count, y, exact)
            return
        gain = norm_weight(weight)
        parts, weights, ids, extra = self.pending(index, s)
        if (norms := self.inputs.sandwich(index)) is not None:
            dense = None if norms.parts is None else self._unrouted_part(index, s)
            sandwich_sum(s.x, dense, parts, weights, ids, extra, rows, count, norms, gain, self._eps, y)
            return
        # attention's output, which this norm still has to add
        attended = self._sums.attended(s) if self.inputs.leaves_attended(index, s) else None
        within = None if rows is not None or parts is None else self._sums.ffn_within_norm(index, parts)
        if within is not None:
            assert parts is not None
            assert gain is not None
            within.add_norm(parts, s.x, count, gain, self._eps, y, attended=attended)
            return
        add_norm(
            s.x, parts, weights, ids, extra, rows, count, gain, self._eps, y.x, y.codes, y.scales, exact,
            attended=attended, centered=self._centered,
        )  # fmt: skip

    def complete(self, index: int, s: GpuWorkspace, count: Tensor) -> None:
        """Launches x += the pending output of layer `index`, where x is a residual of several streams."""
        assert s.streams is not None
        add_block(s.x, self.pending(index, s), s.streams, count)

    def pending(self, index: int, s: GpuWorkspace) -> PendingSum:
        """Returns the layer's pending residual contributions."""
        routes, is_shared = self._routes(index, s), self._is_shared(index)
        is_added = self._sums.sums_ffn(index)  # summed over the GPUs, this one's pool included
        pool_sum = s.pool_sum if is_shared and self._pool_works and not is_added else None
        if self.inputs.part_norms(index) is not None:
            return self._pending_experts(index, s, pool_sum)
        if self._layers[index] is None or (is_added and not s.is_small_batch):
            return PendingSum(s.output, None, None, pool_sum)  # without a feed-forward: the mixer's
        parts = routes.parts if self._has_parts(index) else None
        if s.is_small_batch:
            return PendingSum(parts, None, None, pool_sum)  # already summed, in one part
        return PendingSum(parts, routes.weights, self._ids_here(index, routes), pool_sum)

    def _pending_experts(self, index: int, s: GpuWorkspace, pool_sum: Tensor | None) -> PendingSum:
        """Returns the pending outputs of the routed experts only."""
        routes, top_k = self._routes(index, s), self._shapes[index].num_routes
        if not self._has_routed_parts(index):
            return PendingSum(None, None, None, pool_sum)
        if s.is_small_batch:
            return PendingSum(routes.parts, None, None, pool_sum)
        ids = self._ids_here(index, routes)[:, :top_k]
        return PendingSum(routes.parts[:, :top_k], routes.weights[:, :top_k], ids, pool_sum)

    def behind_norms(self, index: int, s: GpuWorkspace, pending: Tensor) -> Tensor:
        """Returns the layer's change of x, for an observer: float32 [rows, hidden], CPU. pending: sum of `pending`."""
        if (norms := self.inputs.sandwich(index)) is None:
            return pending
        return added_behind_norms(s.x, self._unrouted_part(index, s)[:, 0], pending, norms, self._eps)

    def routing(self, index: int, s: GpuWorkspace) -> LayerRouting | None:
        """Returns the routing of the layer's rows, for an observer."""
        routes, moe = self._routes(index, s), self._shapes[index].moe
        if moe is None:
            return None
        weights = s.input_weights if moe.weighs_input else routes.weights[:, : moe.top_k]
        assert weights is not None
        return LayerRouting(s.router_logits, routes.expert_ids[:, : moe.top_k], weights)

    def _sum_over_gpus(self, index: int, s: GpuWorkspace, count: Tensor) -> None:
        """Sums a large batch's s.output over the GPUs, after attention's output was added to x."""
        routes = self._routes(index, s)
        total = routes.parts
        if not s.is_small_batch:
            sum_parts(routes.parts, routes.weights, self._ids_here(index, routes), count, s.output)
            total = s.output
        if self._is_shared(index) and self._pool_works and not is_compiling_ahead():
            if s.is_small_batch and not self._has_parts(index):
                total.zero_()
            total.add_(s.pool_sum[:, None])
        self._sums.add_ffn(index, total)

    def _has_parts(self, index: int) -> bool:
        return self._has_routed_parts(index) or self._shapes[index].unrouted_width > 0

    def _ids_here(self, index: int, routes: Routes) -> Tensor:
        """Returns each route's index among the experts here; negative if the expert is elsewhere."""
        is_partial = self._expert_maps[index] is not None
        return routes.local_expert_ids if is_partial else routes.expert_ids

    def _unrouted_part(self, index: int, s: GpuWorkspace) -> Tensor:
        """Returns [rows, 1, hidden]: the output buffer of the feed-forward that all tokens pass."""
        routes, at = self._routes(index, s), self._shapes[index].num_routes
        if not s.is_small_batch:
            return routes.parts[:, at : at + 1]
        # Added to the experts' sum; with a norm of its own, in s.output, which x already includes by then.
        return routes.parts if self.inputs.part_norms(index) is None else s.output

    def _unrouted_gated(self, index: int) -> Gated:
        unrouted = self._shapes[index].unrouted
        assert unrouted is not None
        return Gated(unrouted.activation, limit=unrouted.limit)

    def _is_shared(self, index: int) -> bool:
        """True if some experts of the layer are in RAM."""
        return self._num_in_ram[index] > 0

    def _has_routed_parts(self, index: int) -> bool:
        """True if routed experts are here, or were streamed in this step."""
        ffn = self._layers[index]
        return isinstance(ffn, GpuMoe) and (ffn.experts is not None or self._streamed[index] > 0)

    def _routes(self, index: int, s: GpuWorkspace) -> Routes:
        return s.routes[self._shapes[index].num_parts]

    def _to_stream(self, layer: int, batch: GpuBatch) -> int:
        way, count = self._prefill[layer], self._num_in_ram[layer]
        if way == "cuda":
            return count if batch.tiles is not None else 0
        return round(count * batch.streamed) if way == "auto" else 0

    def _share_experts(
        self, index: int, moe: GpuMoe, local_expert_ids: Tensor, s: GpuWorkspace, count: Tensor
    ) -> None:
        """Launches the experts of a layer that shares them with the pool: the pool computes its experts while the
        GPU computes its own, then the streamed ones (not in a graph). If the pool takes part in a step, it expects a
        call for every layer, even those without work for it."""
        stream = self._expert_stream if self._streamed[index] else None
        routes, top_k = self._routes(index, s), self._shapes[index].num_routes
        ids = routes.expert_ids[:, :top_k]
        pool_works = self._pool_works and self._is_shared(index)
        if pool_works:
            assert self._handoff is not None
            left = None if stream is None else stream.left(index)
            x = self.inputs.of_experts(index, s).x if self.inputs.has_own(index) else s.router_input
            assert x is not None
            self._handoff.publish(index, x, ids, routes.weights[:, :top_k], left, on_gpu=local_expert_ids)
        is_here = moe.experts is not None or stream is not None
        gathered = self._gathered(index, moe, ids, s, count) if is_here else None
        if moe.experts is not None:
            self._run_experts(index, moe.experts, local_expert_ids, s, count, gathered=gathered)
        if stream is not None:
            # From here on a negative local_expert_ids means that the expert is neither on the GPU nor streamed.
            streamed_ids = routes.streamed_expert_ids[:, :top_k]
            select_streamed_routes(ids, stream.expert_map(index), streamed_ids, local_expert_ids)
            adds = moe.experts is not None
            experts = stream.take(index)
            self._run_experts(index, experts, streamed_ids, s, count, adds=adds, gathered=gathered)
        if pool_works:
            assert self._handoff is not None
            self._handoff.collect(index, s.pool_sum)

    def _add_unrouted(
        self,
        index: int,
        w: GpuSharedExpert,
        s: GpuWorkspace,
        count: Tensor,
        adapters: LayerAdapters | None,
        names_of: Sequence[str],
    ) -> None:
        """Launches the feed-forward that all tokens pass, as one more route: the column after the router's."""
        shape, routes = self._shapes[index], self._routes(index, s)
        column = slice(shape.num_routes, shape.num_routes + 1)
        assert s.unrouted_blocks is not None
        ids, weights = self._ids_here(index, routes)[:, column], routes.weights[:, column]
        shared_gate(s.router_input, w.gate, count, weights[:, 0], ids[:, 0])
        mine = None if adapters is None else adapters.experts(names_of)
        h, part = s.unrouted_h[shape.unrouted_width], self._unrouted_part(index, s)
        run = ExpertRun(
            s.y, w.experts, self._hidden, shape.unrouted_width, ids, weights, h, s.unrouted_blocks, part,
            self._unrouted_gated(index), mine, None if w.order is None else in_order(s.y, w.order, count, s.dense),
        )  # fmt: skip
        run.launch(s, count, adds=self._has_routed_parts(index) and self.inputs.part_norms(index) is None)

    def _gathered(
        self, index: int, moe: GpuMoe, ids: Tensor, s: GpuWorkspace, count: Tensor
    ) -> GpuActivations | None:
        """Launches the gathering of the experts' input by route; returns None if their columns have no order. ids:
        the layer's, wherever the experts are."""
        if moe.order is None:
            return None
        return in_order(self.inputs.of_experts(index, s), moe.order, count, s.dense, ids)

    def _run_experts(
        self,
        index: int,
        experts: GpuExperts,
        local_expert_ids: Tensor,
        s: GpuWorkspace,
        count: Tensor,
        *,
        adds: bool = False,
        adapters: ExpertAdapters | None = None,
        gathered: GpuActivations | None,
    ) -> None:
        """Launches the experts for routes with an id that is not negative. gathered: `_gathered`."""
        shape, routes = self._shapes[index].moe, self._routes(index, s)
        assert shape is not None
        parts = routes.parts if s.is_small_batch else routes.parts[:, : shape.top_k]
        run = ExpertRun(
            self.inputs.of_experts(index, s), experts, self._hidden, shape.width, local_expert_ids,
            routes.weights[:, : shape.top_k], s.h, s.blocks, parts, gated_product(shape, experts), adapters, gathered,
        )  # fmt: skip
        run.launch(s, count, adds=adds)
