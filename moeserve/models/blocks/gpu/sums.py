"""Sums of block outputs over the GPUs of a tensor-parallel group, and the norms that follow these sums.

A block's output is summed once (kernels/collectives): on its own, or within the norm that adds it to x.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moeserve.kernels.collectives.all_reduce import AllReduce
from moeserve.kernels.collectives.sum_norm_op import SumNorm
from moeserve.kernels.norm.op import add_norm
from moeserve.kernels.routing.op import norm_router
from moeserve.models.blocks.gpu.workspace import GpuWorkspace


class GpuSums:
    """The sums over GPUs of all layers."""

    def __init__(
        self, mixer: AllReduce | None, ffns: Sequence[AllReduce | None], within_norm: SumNorm | None
    ) -> None:
        """mixer, ffns: all-reduce of the mixers' outputs, and of each layer's feed-forward; None: the output is
        already whole. within_norm: all-reduce fused with the norm; None: not possible, or a `LayerObserver` needs
        to see every sum."""
        self._mixer = mixer
        self._ffns = ffns
        self._within_norm = within_norm

    def add_mixer(self, s: GpuWorkspace) -> None:
        """Launches the sum of s.output after a mixer, unless the next norm computes it."""
        if self._mixer is not None and self._mixer_within_norm(s) is None:
            self._mixer(s.output)

    def mixer_norm(
        self, s: GpuWorkspace, count: Tensor, weight: Tensor, eps: float, exact: Tensor | None
    ) -> None:
        """Launches x += the mixer's output summed over the GPUs; s.y (and `exact`, in float32) = norm of x. eps: added
        to the mean square under the norm's root; count: int32 [1] on the device, the number of valid rows."""
        y, within = s.y, self._mixer_within_norm(s)
        if within is not None:
            within.add_norm(s.output, s.x, count, weight, eps, y, exact)
            return
        add_norm(s.x, s.output, None, None, None, None, count, weight, eps, y.x, y.codes, y.scales, exact)

    def mixer_norm_router(
        self, s: GpuWorkspace, count: Tensor, weight: Tensor, eps: float, router: Tensor, bias: Tensor | None
    ) -> None:
        """Launches s.y = norm(x + the mixer's output summed over the GPUs), and the router's logits. x does not
        change: the next norm adds `attended`. May be used only for few rows. eps: added to the mean square under the
        norm's root; count: int32 [1] on the device, the number of valid rows."""
        y, within = s.y, self._mixer_within_norm(s)
        if within is not None:
            within.norm_router(s.output, s.x, count, weight, eps, router, y, s.router_logits, bias=bias)
            return
        output = s.output.view(s.rows, -1)
        norm_router(
            s.x, output, count, weight, eps, router, y.x, y.codes, y.scales, s.router_logits, bias=bias
        )  # fmt: skip

    def attended(self, s: GpuWorkspace) -> Tensor:
        """Returns float32 [rows, hidden]: the mixer's output summed over the GPUs, after `mixer_norm_router`."""
        within = self._mixer_within_norm(s)
        return s.output.view(s.rows, -1) if within is None else within.total(s.rows)

    def sums_ffn(self, index: int) -> bool:
        """Returns whether this GPU computes only part of layer `index`'s feed-forward."""
        return self._ffns[index] is not None

    def add_ffn(self, index: int, partial: Tensor) -> None:
        """Launches the sum over the GPUs of `partial` [rows, hidden], this GPU's part of a feed-forward's output, in
        place; does nothing if the next norm computes the sum. index: of the layer, from 0."""
        all_reduce = self._ffns[index]
        if all_reduce is not None and self.ffn_within_norm(index, partial) is None:
            all_reduce(partial)

    def ffn_within_norm(self, index: int, partial: Tensor) -> SumNorm | None:
        """Returns the kernel that sums `partial` [rows, hidden] of layer `index` over the GPUs and computes the next
        norm; None if both are separate. They are separate after the last layer: its next norm is the head's, which
        reads only some rows and may not run on every rank."""
        is_summed = self.sums_ffn(index) and index < len(self._ffns) - 1
        return self._chosen(partial) if is_summed else None

    def _mixer_within_norm(self, s: GpuWorkspace) -> SumNorm | None:
        return None if self._mixer is None else self._chosen(s.output)

    def _chosen(self, partial: Tensor) -> SumNorm | None:
        within = self._within_norm
        return within if within is not None and within.takes(partial) else None
