"""What blocks sum over the GPUs that compute a model together, and the norms behind these sums.

What a block adds to the residual stream is summed once (kernels/collectives): by itself, or within the norm that adds
it to the stream.
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
        """mixer, ffns: what sums the mixers' outputs, and each layer's feed-forward's; None: they are whole.
        within_norm: the same within the norm; None: not possible, or a `LayerObserver` is to see every sum."""
        self._mixer = mixer
        self._ffns = ffns
        self._within_norm = within_norm

    def add_mixer(self, s: GpuWorkspace) -> None:
        """Behind a mixer: s.output becomes the sum, unless the norm behind it sums."""
        if self._mixer is not None and self._mixer_within_norm(s) is None:
            self._mixer(s.output)

    def mixer_norm(
        self, s: GpuWorkspace, count: Tensor, weight: Tensor, eps: float, exact: Tensor | None
    ) -> None:
        """x += the mixers' output of all GPUs, and s.y (and exact, in float32) the norm of that."""
        y, within = s.y, self._mixer_within_norm(s)
        if within is not None:
            within.add_norm(s.output, s.x, count, weight, eps, y, exact)
            return
        add_norm(s.x, s.output, None, None, None, None, count, weight, eps, y.x, y.codes, y.scales, exact)

    def mixer_norm_router(
        self, s: GpuWorkspace, count: Tensor, weight: Tensor, eps: float, router: Tensor, bias: Tensor | None
    ) -> None:
        """s.y = the norm of x + the mixers' output of all GPUs (`attended`, which is not added yet), and the router's
        logits. Few rows."""
        y, within = s.y, self._mixer_within_norm(s)
        if within is not None:
            within.norm_router(s.output, s.x, count, weight, eps, router, y, s.router_logits, bias=bias)
            return
        output = s.output.view(s.rows, -1)
        norm_router(
            s.x, output, count, weight, eps, router, y.x, y.codes, y.scales, s.router_logits, bias=bias
        )  # fmt: skip

    def attended(self, s: GpuWorkspace) -> Tensor:
        """float32 [rows, hidden]: the mixers' output of all GPUs, behind `mixer_norm_router`."""
        within = self._mixer_within_norm(s)
        return s.output.view(s.rows, -1) if within is None else within.total(s.rows)

    def sums_ffn(self, index: int) -> bool:
        """Layer `index`'s feed-forward is not whole here."""
        return self._ffns[index] is not None

    def add_ffn(self, index: int, partial: Tensor) -> None:
        """Behind a feed-forward that is not whole: partial becomes the sum, unless the norm behind it sums."""
        all_reduce = self._ffns[index]
        if all_reduce is not None and self.ffn_within_norm(index, partial) is None:
            all_reduce(partial)

    def ffn_within_norm(self, index: int, partial: Tensor) -> SumNorm | None:
        """Returns the sum of layer `index`'s feed-forward within the norm behind it. (Behind the last layer that is the
        head's norm, which has some of the rows, and perhaps not on each of the ranks.)"""
        is_summed = self.sums_ffn(index) and index < len(self._ffns) - 1
        return self._chosen(partial) if is_summed else None

    def _mixer_within_norm(self, s: GpuWorkspace) -> SumNorm | None:
        return None if self._mixer is None else self._chosen(s.output)

    def _chosen(self, partial: Tensor) -> SumNorm | None:
        within = self._within_norm
        return within if within is not None and within.takes(partial) else None
