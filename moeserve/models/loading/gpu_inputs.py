"""The weights through which blocks on a GPU read the residual: a norm, or what joins several streams."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moeserve.kernels.streams.attended_op import StreamAttention
from moeserve.kernels.streams.sinkhorn import SinkhornMix
from moeserve.models.loading.merged_linear import MergedLinear
from moeserve.models.loading.unnormed import Unnormed


@dataclass(frozen=True, slots=True)
class GpuStreamMix:
    """The weights that compute a block's input from a residual of several streams: kernels/streams/reference.py."""

    norm: Tensor  # [streams, hidden]
    down: list[MergedLinear]  # the rows of down and, of a block, of inject, in that order
    up: MergedLinear

    @property
    def nbytes(self) -> int:
        return self.up.nbytes + sum(matrix.nbytes for matrix in self.down)


@dataclass(frozen=True, slots=True)
class GpuSinkhornMix:
    """The weights that compute a block's input from streams that are mixed behind it: kernels/streams/sinkhorn.py."""

    product: MergedLinear  # with the normalised residual
    mix: SinkhornMix
    norm: Tensor  # [hidden], of the weighted sum

    @property
    def nbytes(self) -> int:
        return self.product.nbytes


@dataclass(frozen=True, slots=True)
class GpuStreamMean:
    """A head that reads the norm of the streams' mean."""

    norm: Tensor  # [hidden]
    nbytes: int = 0  # of matrices


@dataclass(frozen=True, slots=True)
class GpuAttendedStreams:
    """What a block attends to the residual's streams with."""

    attention: StreamAttention
    nbytes: int = 0  # of matrices


GpuStreams = (
    GpuStreamMix | GpuSinkhornMix | GpuStreamMean | GpuAttendedStreams
)  # what a residual of several streams is read through
GpuNorm = Tensor | Unnormed  # [hidden], of the residual; or the residual itself is read
GpuInput = GpuNorm | GpuStreams  # what a block reads the residual through


def norm_weight(w: GpuNorm) -> Tensor | None:
    """Returns the weight for kernels that compute norms; None: they take the residual as it is."""
    return None if isinstance(w, Unnormed) else w


def input_bytes(w: GpuInput | None) -> int:
    """Returns the bytes of the matrices through which a block reads the residual."""
    return w.nbytes if isinstance(w, GpuStreams) else 0
