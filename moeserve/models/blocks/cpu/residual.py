"""Launches, on the pool's queue, by which blocks read the residual x and add to it: y = norm(x), or x itself, and x +=
block(y).

In the following, streams are parallel residuals, not launch streams. There are three forms of several streams. With
hyper-connections, a block reads a gated mean of the streams, and its output is added to each stream with a weight that
depends on the token (kernels/streams/reference.py). With Sinkhorn's connections, it reads a weighted sum of the
streams, which are mixed after the block (kernels/streams/sinkhorn.py). With attention residuals, it attends to the
streams, and its output is added to one of them (kernels/streams/attended.py).
"""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream, LinearGroup
from moeserve.kernels.stream_operands import Activations
from moeserve.models.blocks.cpu.workspace import (
    AttendedWorkspace,
    CpuWorkspace,
    SinkhornWorkspace,
    StreamsWorkspace,
)
from moeserve.models.loading.cpu_weights import (
    CpuAttendedStreams,
    CpuEmbedding,
    CpuInput,
    CpuLayerNorm,
    CpuMixer,
    CpuNorm,
    CpuSinkhornMix,
    CpuStreamMean,
    CpuStreamMix,
)
from moeserve.models.loading.unnormed import Unnormed


def embed(
    stream: CpuStream, table: CpuEmbedding, token_ids: Tensor, n: int, space: CpuWorkspace, *, scale: float
) -> None:
    """Launches x = the tokens' embeddings, the same in all streams. token_ids: int32 [n]."""
    copies = 1 if space.streams is None else space.streams.count
    stream.embed(table.table, table.ggml_type, token_ids, n, space.x, scale=scale, copies=copies)


def norm_embeddings(stream: CpuStream, ones: Tensor, eps: float, n: int, space: CpuWorkspace) -> None:
    """Launches x = x / sqrt(mean(x^2) + eps) for n rows, in place. ones: float32 [hidden]."""
    stream.norm(space.x, ones, eps, n, Activations.over(space.x))


def read_residual(stream: CpuStream, w: CpuInput, eps: float, n: int, space: CpuWorkspace) -> None:
    """Launches y = the input of a block, computed from x. With several streams, also launches the weights with which
    the block's output is added. eps: added to the mean square under the norm's root; n: rows of the step."""
    if isinstance(w, Tensor | CpuLayerNorm):
        norm(stream, w, eps, n, space.x, space.y)
        return
    if isinstance(w, Unnormed):
        stream.gelu_gate(None, space.x, 0, n, space.y)  # without a gate a copy, quantised
        return
    if isinstance(w, CpuSinkhornMix):
        s = space.streams
        assert isinstance(s, SinkhornWorkspace)
        _read_mixed(stream, w, eps, n, space, space.y, s.products, None, s.weights)
        return
    if isinstance(w, CpuAttendedStreams):
        assert isinstance(space.streams, AttendedWorkspace)
        space.streams.reading = w.reading
        stream.attend_streams(space.x, None, w.score, w.norm, eps, w.reading.num, n, space.y)
        return
    assert isinstance(space.streams, StreamsWorkspace)
    assert isinstance(w, CpuStreamMix)
    _read_streams(stream, w, eps, n, space, space.y, [space.streams.weights], None)


def note_input(w: CpuMixer | None, space: CpuWorkspace) -> None:
    """Notes which streams the block of `w` has read, for the `add_block` of operations that are launched apart from its
    `read_residual`."""
    if w is not None and isinstance(w.norm, CpuAttendedStreams):
        assert isinstance(space.streams, AttendedWorkspace)
        space.streams.reading = w.norm.reading


def read_ahead(
    stream: CpuStream, w: CpuStreamMix | CpuSinkhornMix, eps: float, n: int, space: CpuWorkspace, out: Activations,
    weights: Tensor,
) -> None:  # fmt: skip
    """Launches out = the input [n, hidden] that a later block would compute from x as it is now, between
    `read_residual` and `add_block` of another block. weights: scratch for the weights of that later block's output,
    which nothing reads; eps: added to the mean square under the norm's root; n: rows of the step."""
    if isinstance(w, CpuSinkhornMix):
        assert isinstance(space.streams, SinkhornWorkspace)
        _read_mixed(stream, w, eps, n, space, out, space.streams.products, None, weights)
    else:
        _read_streams(stream, w, eps, n, space, out, [weights], None)


def read_for_head(
    stream: CpuStream, w: CpuInput, eps: float, rows: Tensor, space: CpuWorkspace, out: Activations
) -> None:
    """Launches out = the input of the head for these rows of x. rows: int32 [m]. eps: added to the mean square under
    the norm's root."""
    if isinstance(w, Tensor | CpuLayerNorm | CpuStreamMean):
        norm(stream, w, eps, len(rows), space.x, out, rows)
        return
    if isinstance(w, CpuSinkhornMix):
        s = space.streams
        assert isinstance(s, SinkhornWorkspace)
        _read_mixed(stream, w, eps, len(rows), space, out, s.head_products, rows, None)
        return
    if isinstance(w, CpuAttendedStreams):
        stream.attend_streams(space.x, rows, w.score, w.norm, eps, w.reading.num, len(rows), out)
        return
    assert isinstance(w, CpuStreamMix)
    _read_streams(stream, w, eps, len(rows), space, out, [], rows)


def norm(
    stream: CpuStream,
    w: CpuNorm | CpuStreamMean,
    eps: float,
    n: int,
    x: Tensor,
    out: Activations,
    rows: Tensor | None = None,
) -> None:
    """Launches out = norm(x) for the first n rows, or for `rows`. With several streams, it is the norm of their mean.
    x: float32 [any, hidden], or [any, streams * hidden]. rows: int32 [n]. eps: added to the mean square under the
    norm's root."""
    if isinstance(w, CpuStreamMean):
        stream.read_streams(None, x, rows, None, w.norm, eps, n, out, None)
    elif isinstance(w, CpuLayerNorm):
        stream.norm(x, w.weight, eps, n, out, rows, centered=True)
    else:
        stream.norm(x, w, eps, n, out, rows)


def _read_streams(
    stream: CpuStream,
    w: CpuStreamMix,
    eps: float,
    n: int,
    space: CpuWorkspace,
    out: Activations,
    weights: list[Tensor],
    rows: Tensor | None,
) -> None:
    s = space.streams
    assert isinstance(s, StreamsWorkspace)
    stream.stream_norm(space.x, w.norm, eps, n, s.normed, rows)
    stream.linear(s.normed, n, w.down, [s.low_rank, *weights])
    stream.scaled_silu(s.low_rank, 1.0 / s.count, n, s.gate_input)
    stream.linear(s.gate_input, n, w.up, [s.gate])
    stream.mix_streams(s.gate, s.normed, n, out)


def _read_mixed(
    stream: CpuStream,
    w: CpuSinkhornMix,
    eps: float,
    n: int,
    space: CpuWorkspace,
    out: Activations,
    products: Tensor,
    rows: Tensor | None,
    weights: Tensor | None,
) -> None:
    s = space.streams
    assert isinstance(s, SinkhornWorkspace)
    stream.norm(space.x, w.ones, eps, n, s.normed, rows)
    stream.linear(s.normed, n, w.product, [products])
    stream.read_streams(products, space.x, rows, w.mix, w.norm, eps, n, out, weights)


def block_output(space: CpuWorkspace) -> tuple[Tensor, bool]:
    """Returns the float32 tensor to which a block writes its output, and whether the block adds to the tensor's
    contents (True) or overwrites them. The caller must call `add_block` afterwards."""
    return (space.x, True) if space.streams is None else (space.streams.block, False)


def add_product(stream: CpuStream, a: Activations, n: int, matrix: LinearGroup, space: CpuWorkspace) -> None:
    """Launches x += matrix a for n rows, the last operation of a block."""
    out, add = block_output(space)
    stream.linear(a, n, matrix, [out], add=add)
    add_block(stream, n, space)


def add_block(stream: CpuStream, n: int, space: CpuWorkspace) -> None:
    """Launches the rest of the addition of a block's output to x. n: rows of the step."""
    if isinstance(space.streams, AttendedWorkspace):
        reading = space.streams.reading
        assert reading is not None
        stream.put_stream(space.streams.block, reading.into, n, space.x, add=not reading.begins)
    elif isinstance(space.streams, StreamsWorkspace):
        stream.inject(space.streams.block, space.streams.weights, n, space.x)
    elif space.streams is not None:
        stream.add_streams(space.streams.block, space.streams.weights, n, space.x)
