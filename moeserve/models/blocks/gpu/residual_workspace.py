"""The buffers of a step for a residual of several streams, and for n-gram embeddings, on the GPU."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.streams.op import StreamNorm
from moeserve.models.blocks.gpu.arena_views import activations
from moeserve.models.residual import (
    AttentionResiduals,
    HyperConnections,
    ResidualStreams,
    SinkhornConnections,
)


class SinkhornWorkspace:
    """Additional buffers of a residual of mixed streams (`SinkhornConnections`); the blocks use them in turn."""

    def __init__(self, views: dict[str, Tensor], shape: SinkhornConnections) -> None:
        self.count = shape.count
        self.normed = activations(views, "stream_normed")
        # float32, room for [rows, mix_values] and, for few rows, for `product_sums`
        self.products = views["stream_products"]
        # float32 [rows, added_values]: of the current block's output, and the mix after it
        self.weights = views["stream_weights"]


class AttendedWorkspace:
    """The state of attention residuals (`AttentionResiduals`), which need no buffers. Owns `place`, by which the
    current block's output is added to a stream."""

    def __init__(self) -> None:
        self.place: Tensor | None = None  # int32 [3], a `StreamReading`; None: no block has read yet


class GatedStreamsWorkspace:
    """Additional buffers of a residual of gated streams (`HyperConnections`); the blocks use them in turn. Owns
    `inject`, the logits of the weights with which the current block's output is added to the streams."""

    def __init__(self, views: dict[str, Tensor], shape: HyperConnections) -> None:
        self.norm = StreamNorm(activations(views, "stream_normed"), views["stream_inverse"])
        self.products = views["stream_products"]
        self.widths = (shape.low_rank, shape.count)
        self.low_rank = activations(views, "stream_low_rank")
        self.gate = views["stream_gate"]
        # float32 [rows, streams]; None: no block has read yet.
        self.inject: Tensor | None = None


StreamsWorkspace = GatedStreamsWorkspace | SinkhornWorkspace | AttendedWorkspace


def streams_workspace(views: dict[str, Tensor], shape: ResidualStreams) -> StreamsWorkspace:
    """Returns the workspace of this kind of residual streams, on buffers of `views`."""
    if isinstance(shape, AttentionResiduals):
        return AttendedWorkspace()
    if isinstance(shape, SinkhornConnections):
        return SinkhornWorkspace(views, shape)
    return GatedStreamsWorkspace(views, shape)


class NgramWorkspace:
    """Additional buffers of n-gram embeddings."""

    def __init__(self, views: dict[str, Tensor]) -> None:
        self.embedded = views[
            "ngram_rows"
        ]  # float32 [rows, width]: the step's rows of the table, from the host
        self.input = activations(views, "ngram_input")
        self.products = views["ngram_products"]
        self.factors = views["ngram_factors"]
        self.inputs = views["ngram_inputs"]
