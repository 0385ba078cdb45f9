"""The buffers of a step for a residual of several streams, and for n-gram embeddings, on the GPU."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.streams.op import StreamNorm
from moeserve.models.blocks.gpu.arena_views import activations
from moeserve.models.residual import HyperConnections, ResidualStreams


class StreamsWorkspace:
    """Additional buffers of a residual of several streams, for one block at a time. Owns `inject`."""

    def __init__(self, views: dict[str, Tensor], shape: ResidualStreams) -> None:
        assert isinstance(shape, HyperConnections)  # others are the CPU engine's alone: gpu_features.py
        self.norm = StreamNorm(activations(views, "stream_normed"), views["stream_inverse"])
        self.products = views["stream_products"]
        self.widths = (shape.low_rank, shape.count)
        self.low_rank = activations(views, "stream_low_rank")
        self.gate = views["stream_gate"]
        # float32 [rows, streams]: logits of the weights of the current block's output; None: no block has read yet.
        self.inject: Tensor | None = None


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
