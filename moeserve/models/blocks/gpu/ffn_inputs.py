"""Computes the inputs of feed-forwards on a GPU: a norm of the residual that also adds the attention's output; in a
parallel layer, the input of attention."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.norm.op import sandwich_inputs
from moeserve.kernels.norm.sandwich_norms import PartNorms, SandwichNorms
from moeserve.models.blocks.gpu.expert_run import PendingSum
from moeserve.models.blocks.gpu.linear import DenseWorkspace, multiply
from moeserve.models.blocks.gpu.residual import read_streams
from moeserve.models.blocks.gpu.sums import GpuSums
from moeserve.models.blocks.gpu.workspace import GpuWorkspace
from moeserve.models.interface import LayerShape
from moeserve.models.loading.gpu_inputs import GpuInput, GpuStreams
from moeserve.models.loading.gpu_weights import GpuDenseFfn, GpuMoe


class GpuFfnInputs:
    """The inputs of all layers' feed-forwards."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        layers: Sequence[GpuMoe | GpuDenseFfn | None],
        sums: GpuSums,
        eps: float,
    ) -> None:
        self._shapes = shapes
        self._layers = layers
        self._sums = sums
        self._eps = eps

    def fuses_router_norm(self, index: int, s: GpuWorkspace) -> bool:
        """Returns whether one kernel computes the norm before the router and the router's product. That kernel leaves
        the residual as it is: the next norm, after the feed-forward, also adds the attention's output to it. index: of
        the layer, from 0."""
        ffn = self._layers[index]
        if not isinstance(ffn, GpuMoe) or ffn.sandwich is not None or not s.is_small_batch:
            return False
        return isinstance(ffn.norm, Tensor) and not ffn.router.first.quantised

    def leaves_attended(self, index: int, s: GpuWorkspace) -> bool:
        """Returns whether the next norm adds the attention's output. index: of the layer, from 0."""
        return self._shapes[index].is_parallel or self.fuses_router_norm(index, s)

    def exact(self, index: int, s: GpuWorkspace) -> Tensor | None:
        """Returns the buffer into which the norm before the layer also writes its result in float32, for the
        feed-forward of a parallel layer; None if it need not. index: of the layer, from 0."""
        return s.router_input if self._shapes[index].is_parallel and s.router_input is not s.y.x else None

    def sandwich(self, index: int) -> SandwichNorms | None:
        return None if (ffn := self._layers[index]) is None else ffn.sandwich

    def part_norms(self, index: int) -> PartNorms | None:
        norms = self.sandwich(index)
        return None if norms is None else norms.parts

    def of_experts(self, index: int, s: GpuWorkspace) -> GpuActivations:
        """Returns the activations that the routed experts read. index: of the layer, from 0."""
        if not self.has_own(index):
            return s.y
        if s.latent_experts is not None:
            return s.latent_experts.input
        assert s.experts_input is not None
        return s.experts_input

    def has_own(self, index: int) -> bool:
        """True if the routed experts read another input than the shared feed-forward. index: of the layer, from 0."""
        moe = self._shapes[index].moe
        return self.part_norms(index) is not None or (
            moe is not None and (moe.weighs_input or moe.latent > 0)
        )

    def norm(self, index: int, weight: GpuInput, s: GpuWorkspace, count: Tensor) -> None:
        """Launches y = norm(x + the attention's output); with a residual of several streams, y = the feed-forward's
        reading of the streams. index: of the layer, from 0; count: int32 [1] on the device, the number of valid
        rows."""
        exact, norms = None if s.router_input is s.y.x else s.router_input, self.sandwich(index)
        if isinstance(weight, GpuStreams):
            mixed = PendingSum(s.output, None, None, None)
            self.read_streams(weight, mixed, s, count, s.y, exact)
        elif norms is None:
            assert isinstance(weight, Tensor)  # only sandwiched layers have no norm here
            self._sums.mixer_norm(s, count, weight, self._eps, exact)
        else:
            sandwich_inputs(s.x, s.output.view(s.rows, -1), norms, count, self._eps, s.y, exact, None)

    def read_streams(
        self,
        w: GpuStreams,
        pending: PendingSum | None,
        s: GpuWorkspace,
        count: Tensor,
        y: GpuActivations,
        exact: Tensor | None,
    ) -> None:
        """Launches x += pending, and y = a block's reading of the residual's streams. count: int32 [1] on the device,
        the number of valid rows."""
        assert s.streams is not None
        read_streams(w, self._eps, s.x, pending, None, count, s.streams, y, exact, s.dense)

    def router(self, index: int, moe: GpuMoe, s: GpuWorkspace, count: Tensor) -> None:
        """Launches the norm, and the router's logits. index: of the layer, from 0; count: int32 [1] on the device, the
        number of valid rows."""
        y, router = s.y, moe.router
        if self.fuses_router_norm(index, s):
            assert isinstance(moe.norm, Tensor)
            self._sums.mixer_norm_router(s, count, moe.norm, self._eps, router.first.codes[0], router.bias)
            return
        if moe.sandwich is None or moe.sandwich.parts is None:
            if moe.norm is not None:
                self.norm(index, moe.norm, s, count)
        else:
            experts = self.of_experts(index, s)
            output = s.output.view(s.rows, -1)
            sandwich_inputs(s.x, output, moe.sandwich, count, self._eps, y, s.router_input, experts)
        into_router = y if router.first.quantised else GpuActivations(s.router_input, None, None)
        multiply(router, into_router, count, s.router_logits, DenseWorkspace(None, None, s.dense.gathered))
