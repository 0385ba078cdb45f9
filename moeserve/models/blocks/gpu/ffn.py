"""The feed-forwards of all layers, as launches on the current stream.

The GPU computes the experts in its memory while the CPU pool computes those in RAM (`kernels/handoff`); or RAM experts
are streamed to the GPU (`ram_share.py`). A layer without experts has one feed-forward, treated like a shared expert.

A layer's output is left in parts (`ffn_outputs.py`). The next norm adds them to x; sandwiched layers normalise them
first. A layer with an input of its own (per-layer embeddings) adds the parts itself, and leaves the product of that
input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.experts.op import shared_gate
from moeserve.kernels.experts.weigh_input import weigh_input
from moeserve.kernels.handoff import ExpertHandoff
from moeserve.kernels.linear.operands import Gated
from moeserve.kernels.norm.op import add_norm, sandwich_sum
from moeserve.kernels.norm.sandwich_norms import SandwichNorms
from moeserve.kernels.routing.op import route, select_streamed_routes
from moeserve.models.blocks.gpu.dense_rows import multiply_dense, takes_dense_products
from moeserve.models.blocks.gpu.expert_run import ExpertRun, PendingSum, gated_product
from moeserve.models.blocks.gpu.ffn_inputs import GpuFfnInputs
from moeserve.models.blocks.gpu.ffn_outputs import FfnOutputs
from moeserve.models.blocks.gpu.forced_routing import ForcedRouting
from moeserve.models.blocks.gpu.latent_experts import project_back, project_in
from moeserve.models.blocks.gpu.layer_inputs import project_input
from moeserve.models.blocks.gpu.linear import in_order
from moeserve.models.blocks.gpu.lora_products import ExpertAdapters, LayerAdapters
from moeserve.models.blocks.gpu.ram_share import RamShare
from moeserve.models.blocks.gpu.residual import add_block
from moeserve.models.blocks.gpu.sums import GpuSums
from moeserve.models.blocks.gpu.workspace import GpuBatch, GpuWorkspace
from moeserve.models.interface import ModelShape
from moeserve.models.loading.expert_stream import ExpertStream
from moeserve.models.loading.gpu_inputs import GpuInput, GpuStreams, norm_weight
from moeserve.models.loading.gpu_weights import GpuDenseFfn, GpuExperts, GpuLayer, GpuMoe, GpuSharedExpert
from moeserve.models.sources.gguf import names


class GpuFfnBlock:
    """The feed-forwards of all layers on a GPU. Owns `inputs`, `outputs`, `ram` and `expert_token_counts`."""

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
        """layers: the weights of the last layers of `shape`. handoff: the hand-off to the CPU pool, if the pool has
        experts. expert_stream: streams experts from RAM, in layers whose `prefill` is not "cpu". sums: the sums over
        the GPUs of a tensor-parallel group. num_in_ram: number of experts that the pool has, by layer; None: all that
        are not on this GPU."""
        self._sums = sums
        self._forced_routing = forced_routing
        self._eps = shape.rms_eps
        self._centered = shape.centers_norms
        self._hidden = shape.hidden_size
        self._shapes = shape.layers[shape.num_layers - len(layers) :]
        self._layers = [layer.ffn for layer in layers]
        self._own_inputs = [layer.input for layer in layers]
        self.inputs = GpuFfnInputs(self._shapes, self._layers, sums, shape.rms_eps)
        maps = [layer.expert_map for layer in layers]
        self.ram = RamShare(maps, handoff, expert_stream, prefill, num_in_ram)
        self.outputs = FfnOutputs(self._shapes, layers, self.inputs, self.ram, sums, shape.rms_eps)
        # int64 [layers, experts]: tokens routed to each expert since start-up.
        self.expert_token_counts = torch.zeros(
            len(layers), shape.num_experts, dtype=torch.int64, device=device
        )

    def forget_counts(self) -> None:
        """Zeroes the expert counts, on the GPU and in RAM."""
        self.expert_token_counts.zero_()
        self.ram.forget_counts()

    def mix(
        self, index: int, s: GpuWorkspace, batch: GpuBatch, adapters: LayerAdapters | None = None
    ) -> None:
        """Launches a layer's feed-forward, and the product of its own input, if it has one. Reads s.x and s.output
        (attention's output). `outputs.pending` has the result. index: of the layer, from 0."""
        count = batch.count
        ffn = self._layers[index]
        if isinstance(ffn, GpuDenseFfn):
            if ffn.norm is not None:
                self.inputs.norm(index, ffn.norm, s, count)
            changed = adapters is not None and adapters.change(names.FFN_PARTS)
            if takes_dense_products(ffn.expert.experts, s) and not changed:
                out, form = self.outputs.routes(index, s).parts[:, 0], self._unrouted_gated(index).form
                multiply_dense(ffn.expert, s, count, out, form)
            else:
                self._add_unrouted(index, ffn.expert, s, count, adapters, names.FFN_PARTS)
        elif ffn is not None:
            self._mix_experts(index, ffn, s, count, batch.token_ids, adapters)
        self.outputs.sum_over_gpus(index, s, count)
        own, norms = self._own_inputs[index], self.inputs.sandwich(index)
        if own is not None and norms is not None:
            self._sum_after_norms(index, norms, self.outputs.pending_ffn(index, s), s, None, count, s.y, None)
            project_input(own, index, count, s)

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
        routes = self.outputs.routes(index, s)
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
        if ffn.latent:
            project_in(ffn, count, s)
        if local is None:
            assert ffn.experts is not None
            mine = None if adapters is None else adapters.experts(names.EXPERT_PARTS)
            gathered = self._gathered(index, ffn, ids, s, count)
            self._run_experts(index, ffn.experts, ids, s, count, adapters=mine, gathered=gathered)
        else:
            self._share_experts(index, ffn, local, s, count)
        if ffn.latent:
            self._project_back(index, ffn, s, count)
        if ffn.shared is not None:
            self._add_unrouted(index, ffn.shared, s, count, adapters, names.SHARED_PARTS)

    def _project_back(self, index: int, ffn: GpuMoe, s: GpuWorkspace, count: Tensor) -> None:
        """Launches the product after latent experts."""
        assert s.latent_experts is not None
        if not self.ram.computes(index):
            s.latent_experts.sum.zero_()
        out = self.outputs.routes(index, s).parts[:, 0] if s.is_small_batch else s.pool_sum
        project_back(ffn, self.outputs.latent_parts(index, s), count, s, out, self._eps)

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
        """Launches x += the pending output of layer `index`, then y = norm(x), or y = x if the weight has no norm.
        With `rows`, only for these rows, and x stays unchanged. exact: `GpuFfnInputs.exact` of the next layer. count:
        int32 [1] on the device, the number of valid rows."""
        if isinstance(weight, GpuStreams):
            assert rows is None  # the head reads streams that are complete
            self.inputs.read_streams(weight, self.outputs.pending(index, s), s, count, y, exact)
            return
        gain = norm_weight(weight)
        pending, own = self.outputs.pending(index, s), self._own_inputs[index]
        norms = self.inputs.sandwich(index) if own is None else own.post_norms
        if norms is not None:
            self._sum_after_norms(index, norms, pending, s, rows, count, y, gain)
            return
        parts, weights, ids, extra = pending
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

    def _sum_after_norms(
        self,
        index: int,
        norms: SandwichNorms,
        pending: PendingSum,
        s: GpuWorkspace,
        rows: Tensor | None,
        count: Tensor,
        y: GpuActivations,
        gain: Tensor | None,
    ) -> None:
        """Launches x += the pending output after a layer's norms, and y = norm(x), or y = x if gain is None."""
        dense = None if norms.parts is None else self.outputs.unrouted_part(index, s)
        sandwich_sum(s.x, dense, *pending, rows, count, norms, gain, self._eps, y)

    def complete(self, index: int, s: GpuWorkspace, count: Tensor) -> None:
        """Launches x += the pending output of layer `index`, where x is a residual of several streams. count: int32
        [1] on the device, the number of valid rows."""
        assert s.streams is not None
        add_block(s.x, self.outputs.pending(index, s), s.streams, count)

    def _unrouted_gated(self, index: int) -> Gated:
        unrouted = self._shapes[index].unrouted
        assert unrouted is not None
        return Gated(unrouted.activation, limit=unrouted.limit, alpha=unrouted.alpha)

    def _share_experts(
        self, index: int, moe: GpuMoe, local_expert_ids: Tensor, s: GpuWorkspace, count: Tensor
    ) -> None:
        """Launches the experts of a layer that shares them with the pool: the pool computes its experts while the
        GPU computes its own, then the streamed ones (not in a graph). If the pool takes part in a step, every layer
        must call it, even with no work for it."""
        stream = self.ram.expert_stream if self.ram.streamed[index] else None
        routes, top_k = self.outputs.routes(index, s), self._shapes[index].num_routes
        ids = routes.expert_ids[:, :top_k]
        pool_works = self.ram.computes(index)
        fetch = self.ram.fetch_of(index, len(ids)) if pool_works else None
        if pool_works:
            assert self.ram.handoff is not None
            left = None if stream is None else stream.left(index)
            if fetch is not None:
                fetch.choose(index, ids, local_expert_ids)
            x = self.inputs.of_experts(index, s).x if self.inputs.has_own(index) else s.router_input
            assert x is not None
            self.ram.handoff.publish(index, x, ids, routes.weights[:, :top_k], left, on_gpu=local_expert_ids)
            if fetch is not None:
                fetch.copy(index)
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
            assert self.ram.handoff is not None
            out = s.pool_sum if s.latent_experts is None else s.latent_experts.sum
            self.ram.handoff.collect(index, out, *(() if fetch is None else fetch.balance(index)))

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
        shape = self._shapes[index]
        assert s.unrouted_blocks is not None
        ids, weights = self.outputs.unrouted_route(index, s)
        shared_gate(s.router_input, w.gate, count, weights[:, 0], ids[:, 0])
        mine = None if adapters is None else adapters.experts(names_of)
        h, part = s.unrouted_h[shape.unrouted_width], self.outputs.unrouted_part(index, s)
        run = ExpertRun(
            s.y, w.experts, self._hidden, shape.unrouted_width, ids, weights, h, s.unrouted_blocks, part,
            self._unrouted_gated(index), mine, None if w.order is None else in_order(s.y, w.order, count, s.dense),
        )  # fmt: skip
        run.launch(s, count, adds=self.outputs.adds_unrouted(index))

    def _gathered(
        self, index: int, moe: GpuMoe, ids: Tensor, s: GpuWorkspace, count: Tensor
    ) -> GpuActivations | None:
        """Launches the gathering of the experts' input by route; returns None if their columns have no order. ids: the
        layer's expert ids, including experts elsewhere."""
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
        shape, routes = self._shapes[index].moe, self.outputs.routes(index, s)
        assert shape is not None
        outputs = routes.parts if s.latent_experts is None else s.latent_experts.parts
        parts = outputs if s.is_small_batch else outputs[:, : shape.top_k]
        run = ExpertRun(
            self.inputs.of_experts(index, s), experts, shape.latent or self._hidden, shape.width, local_expert_ids,
            routes.weights[:, : shape.top_k], s.h, s.blocks, parts, gated_product(shape, experts), adapters, gathered,
        )  # fmt: skip
        run.launch(s, count, adds=adds)
