"""Finds the buffers in which a layer's feed-forward leaves its output: in parts, which the next norm adds to x."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moeserve.kernels.experts.sum_parts import sum_parts
from moeserve.kernels.launch import is_compiling_ahead
from moeserve.models.blocks.gpu.expert_run import PendingSum
from moeserve.models.blocks.gpu.ffn_inputs import GpuFfnInputs
from moeserve.models.blocks.gpu.post_norms import added_after_norms, around_own_input
from moeserve.models.blocks.gpu.ram_share import RamShare
from moeserve.models.blocks.gpu.sums import GpuSums
from moeserve.models.blocks.gpu.workspace import GpuWorkspace, Routes
from moeserve.models.interface import LayerShape
from moeserve.models.loading.gpu_weights import GpuLayer, GpuMoe
from moeserve.models.observer import LayerRouting


class FfnOutputs:
    """Knows which buffers of the workspace hold the parts of each layer's output."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        layers: Sequence[GpuLayer],
        inputs: GpuFfnInputs,
        ram: RamShare,
        sums: GpuSums,
        eps: float,
    ) -> None:
        """shapes, layers: the shape and the weights of each layer. The other arguments are those of `GpuFfnBlock`."""
        self._shapes = shapes
        self._layers = [layer.ffn for layer in layers]
        self._own_inputs = [layer.input for layer in layers]
        self._has_expert_map = [layer.expert_map is not None for layer in layers]
        self._inputs = inputs
        self._ram = ram
        self._sums = sums
        self._eps = eps

    def pending(self, index: int, s: GpuWorkspace) -> PendingSum:
        """Returns what is still to be added to the residual for the layer: the product of its own input, if it has
        one, else the feed-forward's output. index: of the layer, from 0."""
        if self._own_inputs[index] is not None:
            return PendingSum(s.output, None, None, None)
        return self.pending_ffn(index, s)

    def pending_ffn(self, index: int, s: GpuWorkspace) -> PendingSum:
        """Returns what is still to be added to the residual for the layer's feed-forward. index: of the layer, from
        0."""
        routes, is_shared = self.routes(index, s), self._ram.is_shared(index)
        is_added = self._sums.sums_ffn(index)  # summed over the GPUs, this one's pool included
        if self._is_latent(index):
            return self._pending_latent(index, s)
        pool_sum = s.pool_sum if is_shared and self._ram.pool_works and not is_added else None
        if self._inputs.part_norms(index) is not None:
            return self._pending_experts(index, s, pool_sum)
        if self._layers[index] is None or (is_added and not s.is_small_batch):
            return PendingSum(s.output, None, None, pool_sum)  # without a feed-forward: the mixer's
        parts = routes.parts if self._has_parts(index) else None
        if s.is_small_batch:
            return PendingSum(parts, None, None, pool_sum)  # already summed, in one part
        return PendingSum(parts, routes.weights, self.ids_here(index, routes), pool_sum)

    def latent_parts(self, index: int, s: GpuWorkspace) -> PendingSum:
        """Returns the outputs of the latent experts on the GPU, as wide as their input. index: of the layer, from
        0."""
        assert s.latent_experts is not None
        if not self.has_routed_parts(index):
            return PendingSum(None, None, None, None)
        if s.is_small_batch:
            return PendingSum(s.latent_experts.parts, None, None, None)
        routes = self.routes(index, s)
        return PendingSum(s.latent_experts.parts, routes.weights, self.ids_here(index, routes), None)

    def _pending_latent(self, index: int, s: GpuWorkspace) -> PendingSum:
        """Returns the product after latent experts, and the shared expert's output: with few rows one part."""
        assert s.latent_experts is not None
        parts = self.routes(index, s).parts
        if s.is_small_batch:
            return PendingSum(parts, None, None, None)
        if not self._shapes[index].unrouted_width:
            return PendingSum(None, None, None, s.pool_sum)
        return PendingSum(parts, s.latent_experts.shared_weights, s.latent_experts.shared_ids, s.pool_sum)

    def _is_latent(self, index: int) -> bool:
        moe = self._shapes[index].moe
        return moe is not None and moe.latent > 0

    def _pending_experts(self, index: int, s: GpuWorkspace, pool_sum: Tensor | None) -> PendingSum:
        """Returns the pending outputs of the routed experts only."""
        routes, top_k = self.routes(index, s), self._shapes[index].num_routes
        if not self.has_routed_parts(index):
            return PendingSum(None, None, None, pool_sum)
        if s.is_small_batch:
            return PendingSum(routes.parts, None, None, pool_sum)
        ids = self.ids_here(index, routes)[:, :top_k]
        return PendingSum(routes.parts[:, :top_k], routes.weights[:, :top_k], ids, pool_sum)

    def after_norms(self, index: int, s: GpuWorkspace, pending: Tensor) -> Tensor:
        """Returns the layer's change of x, for an observer: float32 [rows, hidden], CPU. pending: the sum of the
        layer's outputs before post-norms, of the same shape. index: of the layer, from 0."""
        if (norms := self._inputs.sandwich(index)) is None:
            return pending
        return added_after_norms(s.x, self.unrouted_part(index, s)[:, 0], pending, norms, self._eps)

    def around_own_input(self, index: int, s: GpuWorkspace, change: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns, for an observer, the residual after attention and the layer's change of it, float32 [rows, hidden]
        on the host; None for a layer without an input of its own. change: the feed-forward's part of it, from
        `after_norms`; index: of the layer, from 0."""
        if (own := self._own_inputs[index]) is None:
            return None
        projected = s.output.view(s.rows, -1).cpu().float()
        return around_own_input(s.x, change, projected, own.post_norms, self._eps)

    def routing(self, index: int, s: GpuWorkspace) -> LayerRouting | None:
        """Returns the routing of the layer's rows, for an observer; None for a layer without experts. index: of the
        layer, from 0."""
        routes, moe = self.routes(index, s), self._shapes[index].moe
        if moe is None:
            return None
        weights = s.input_weights if moe.weighs_input else routes.weights[:, : moe.top_k]
        assert weights is not None
        return LayerRouting(s.router_logits, routes.expert_ids[:, : moe.top_k], weights)

    def sum_over_gpus(self, index: int, s: GpuWorkspace, count: Tensor) -> None:
        """Launches the sum of the layer's output, the CPU pool's part included, over the GPUs, if it is divided among
        them. In a large batch it is left in s.output, after attention's output was added to x. index: of the layer,
        from 0; count: int32 [1] on the device, the number of valid rows."""
        if not self._sums.sums_ffn(index):
            return
        routes = self.routes(index, s)
        total = routes.parts
        if not s.is_small_batch:
            sum_parts(routes.parts, routes.weights, self.ids_here(index, routes), count, s.output)
            total = s.output
        if self._ram.is_shared(index) and self._ram.pool_works and not is_compiling_ahead():
            if s.is_small_batch and not self._has_parts(index):
                total.zero_()
            total.add_(s.pool_sum[:, None])
        self._sums.add_ffn(index, total)

    def routes(self, index: int, s: GpuWorkspace) -> Routes:
        """Returns the buffers of the layer's routes. index: of the layer, from 0."""
        return s.routes[self._shapes[index].num_parts]

    def ids_here(self, index: int, routes: Routes) -> Tensor:
        """Returns each route's index among the experts on this GPU, int32 [rows, parts]; negative if the expert is not
        on it. index: of the layer, from 0."""
        return routes.local_expert_ids if self._has_expert_map[index] else routes.expert_ids

    def unrouted_part(self, index: int, s: GpuWorkspace) -> Tensor:
        """Returns [rows, 1, hidden]: the output buffer of the feed-forward that all tokens pass. index: of the layer,
        from 0."""
        routes, at = self.routes(index, s), self._shapes[index].num_routes
        if self._is_latent(index):
            return routes.parts
        if not s.is_small_batch:
            return routes.parts[:, at : at + 1]
        # Added to the experts' sum; with a norm of its own, in s.output, which x already includes by then.
        return routes.parts if self._inputs.part_norms(index) is None else s.output

    def unrouted_route(self, index: int, s: GpuWorkspace) -> tuple[Tensor, Tensor]:
        """Returns the ids and weights of that feed-forward's route, [rows, 1] each. index: of the layer, from 0."""
        if self._is_latent(index):
            assert s.latent_experts is not None
            return s.latent_experts.shared_ids, s.latent_experts.shared_weights
        routes, at = self.routes(index, s), self._shapes[index].num_routes
        return self.ids_here(index, routes)[:, at : at + 1], routes.weights[:, at : at + 1]

    def adds_unrouted(self, index: int) -> bool:
        """Returns whether, in a step of few rows, the feed-forward that all tokens pass adds its output to the contents
        of its buffer; False: it overwrites them. index: of the layer, from 0."""
        if self._is_latent(index):
            return True
        return self.has_routed_parts(index) and self._inputs.part_norms(index) is None

    def has_routed_parts(self, index: int) -> bool:
        """Returns whether routed experts are here, or were streamed in this step. index: of the layer, from 0."""
        ffn = self._layers[index]
        return isinstance(ffn, GpuMoe) and (ffn.experts is not None or self._ram.streamed[index] > 0)

    def _has_parts(self, index: int) -> bool:
        return self.has_routed_parts(index) or self._shapes[index].unrouted_width > 0
