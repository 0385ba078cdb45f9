"""The weights with which blocks on a GPU read the residual: the weights of a norm, or of a combination of several
streams."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moeserve.kernels.streams.attended_op import StreamAttention
from moeserve.kernels.streams.sinkhorn import SinkhornMix
from moeserve.models.loading.merged_linear import MergedLinear
from moeserve.models.loading.unnormed import Unnormed


@dataclass(frozen=True, slots=True)
class GpuStreamMix:
    """The weights that compute a block's input from a residual of several streams (kernels/streams/reference.py), and
    add its output to each stream."""

    norm: Tensor  # [streams, hidden]
    down: list[MergedLinear]  # the rows of down and, of a block, of inject, in that order
    up: MergedLinear

    @property
    def nbytes(self) -> int:
        return self.up.nbytes + sum(matrix.nbytes for matrix in self.down)


@dataclass(frozen=True, slots=True)
class GpuSinkhornMix:
    """The weights that compute a block's input from streams that are mixed by a doubly stochastic matrix after the
    block: kernels/streams/sinkhorn.py."""

    product: MergedLinear  # with the normalised residual
    mix: SinkhornMix
    norm: Tensor  # [hidden], of the weighted sum

    @property
    def nbytes(self) -> int:
        return self.product.nbytes


@dataclass(frozen=True, slots=True)
class GpuStreamMean:
    """The weight of the norm through which the head reads the mean of the residual's streams."""

    norm: Tensor  # [hidden]
    nbytes: int = 0  # of matrices


@dataclass(frozen=True, slots=True)
class GpuAttendedStreams:
    """The weights by which a block attends to the residual's streams."""

    attention: StreamAttention
    nbytes: int = 0  # of matrices


# The weights by which a block reads a residual of several streams.
GpuStreams = GpuStreamMix | GpuSinkhornMix | GpuStreamMean | GpuAttendedStreams
# The weight [hidden] of the residual's norm; Unnormed: a block reads the residual itself.
GpuNorm = Tensor | Unnormed
GpuInput = GpuNorm | GpuStreams  # the weights by which a block reads any residual


def norm_weight(w: GpuNorm) -> Tensor | None:
    """Returns the RMSNorm weight, [hidden], for kernels that compute the norm themselves; None: they read the residual
    without a norm."""
    return None if isinstance(w, Unnormed) else w


def input_bytes(w: GpuInput | None) -> int:
    """Returns the bytes of the matrices through which a block reads the residual."""
    return w.nbytes if isinstance(w, GpuStreams) else 0
