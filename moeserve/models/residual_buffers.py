"""The buffers of a GPU's step for a residual of several streams, and for n-gram embeddings. No torch."""

from __future__ import annotations

from math import prod

from moeserve.kernels.streams.product_sums import PRODUCT_ROWS, product_sums
from moeserve.models.buffers import Buffer, activation_buffers
from moeserve.models.residual import AttentionResiduals, NgramShape, ResidualStreams, SinkhornConnections


def stream_buffers(
    streams: ResidualStreams, hidden: int, rows: int, acts: str, wide: str, *, quantised: bool
) -> list[Buffer]:
    """Returns the buffers of one block that reads a residual of several streams. acts: dtype of activations; quantised:
    they are also int8. wide: dtype between two products."""
    if isinstance(streams, AttentionResiduals):
        return []
    width = streams.count * hidden
    if isinstance(streams, SinkhornConnections):
        sums = prod(product_sums(min(rows, PRODUCT_ROWS), hidden, streams.mix_values))
        return [
            *activation_buffers("stream_normed", rows, width, acts, quantised=quantised),
            Buffer("stream_products", (max(rows * streams.mix_values, sums),)),
            Buffer("stream_weights", (rows, streams.added_values)),
        ]
    return [
        *activation_buffers("stream_normed", rows, width, acts, quantised=quantised),
        Buffer("stream_inverse", (rows, streams.count)),
        Buffer("stream_products", (rows * (streams.low_rank + streams.count),)),
        *activation_buffers("stream_low_rank", rows, streams.low_rank, acts, quantised=quantised),
        Buffer("stream_gate", (rows, width), wide),
    ]


def ngram_buffers(
    shape: NgramShape, residual: int, hidden: int, rows: int, acts: str, wide: str, *, quantised: bool
) -> list[Buffer]:
    """Returns the buffers of the layer that adds n-gram embeddings. Other arguments as for `stream_buffers`."""
    return [
        Buffer("ngram_rows", (rows, shape.width)),  # the table's rows, from the host
        *activation_buffers("ngram_input", rows, shape.width, acts, quantised=quantised),
        Buffer("ngram_products", (rows * (residual + hidden),), wide),  # keys and values
        Buffer("ngram_factors", (rows, residual // hidden)),
        Buffer("ngram_inputs", (rows, residual)),  # of the convolution
    ]
