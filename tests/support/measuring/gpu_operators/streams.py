"""Residuals of several streams and n-gram embeddings, of Qwen3.8-Flash-Next's and DeepSeek-V4's sizes."""

from __future__ import annotations

import torch

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.delta_net.op import StepSequences
from moeserve.kernels.embed.op import embed
from moeserve.kernels.ngrams.op import NgramTensors, add_ngrams
from moeserve.kernels.residual_operations import NgramNorms
from moeserve.kernels.streams.attended_op import PlacedBlock, StreamAttention, add_block, attend_streams
from moeserve.kernels.streams.op import (
    StreamBlock,
    StreamNorm,
    add_to_streams,
    mix_streams,
    norm_streams,
    scaled_silu,
)
from moeserve.kernels.streams.product_sums import product_sums
from moeserve.kernels.streams.sinkhorn import SinkhornMix
from moeserve.kernels.streams.sinkhorn_op import MixedBlock, mixed_products, norm_mixed, read_mixed
from tests.support.measuring.gpu_operators.tensors import Q4, both, empty, i32, weight

STREAMS, HIDDEN, LOW_RANK, PARTS = 4, 2048, 320, 9
MIXED_HIDDEN = 7168


def hyper_connections(n: int, kind: torch.dtype) -> None:
    count, at, width = empty(1, dtype=i32), empty(n, dtype=i32), STREAMS * HIDDEN
    x, norm = empty(n, width), empty(STREAMS, HIDDEN)
    embed(at, count, weight(Q4, 9, HIDDEN), int(Q4), x, streams=STREAMS)
    out = StreamNorm(GpuActivations(*both(n, width, kind)), empty(n, STREAMS))
    products = empty(n, LOW_RANK + STREAMS)
    low_rank, inject = products[:, :LOW_RANK], products[:, LOW_RANK:]
    parts, shares, ids = empty(n, PARTS, HIDDEN, dtype=kind), empty(n, PARTS), empty(n, PARTS, dtype=i32)
    of_experts = StreamBlock(parts, shares, ids, empty(n, HIDDEN), inject)
    for block in (of_experts, StreamBlock(empty(n, 1, HIDDEN, dtype=kind), None, None, None, inject)):
        norm_streams(x, block, None, count, norm, 1e-6, out)
        add_to_streams(x, block, count)
    norm_streams(x, None, at, count, norm, 1e-6, out)
    scaled_silu(low_rank, 0.25, count, GpuActivations(*both(n, LOW_RANK, kind)))
    y = GpuActivations(*both(n, HIDDEN, kind))
    for rows, exact in ((None, empty(n, HIDDEN)), (at, None)):
        mix_streams(empty(n, width, dtype=kind), x, rows, norm, out.inverse, count, y, exact)


def mixed_streams(n: int, kind: torch.dtype) -> None:
    count, at, hidden = empty(1, dtype=i32), empty(n, dtype=i32), MIXED_HIDDEN
    x, values = empty(n, STREAMS * hidden), STREAMS * (2 + STREAMS)
    weights, y = empty(n, STREAMS * (1 + STREAMS)), GpuActivations(*both(n, hidden, kind))
    parts, shares, ids = empty(n, PARTS, hidden, dtype=kind), empty(n, PARTS), empty(n, PARTS, dtype=i32)
    for block in (
        MixedBlock(parts, shares, ids, empty(n, hidden), weights),
        MixedBlock(empty(n, 1, hidden, dtype=kind), None, None, None, weights),
    ):
        for normed in (GpuActivations(*both(n, STREAMS * hidden, kind)), None):
            norm_mixed(x, block, None, STREAMS, count, 1e-6, normed)
    norm_mixed(x, None, at, STREAMS, count, 1e-6, GpuActivations(*both(n, STREAMS * hidden, kind)))
    sums, of_head = empty(*product_sums(n, hidden, values)), empty(*product_sums(n, hidden, STREAMS))
    mixed_products(x, block, None, STREAMS, count, empty(values, STREAMS * hidden), sums)
    mixed_products(x, None, at, STREAMS, count, empty(STREAMS, STREAMS * hidden, dtype=kind), of_head)
    mix = SinkhornMix(empty(values), empty(3), 1e-6, 20)
    for products in (empty(n, values), sums):
        read_mixed(products, x, None, mix, empty(hidden), 1e-6, count, y, empty(n, hidden), weights)
    for products in (empty(n, STREAMS), of_head):
        read_mixed(products, x, at, mix, empty(hidden), 1e-6, count, y, None, None)


def attended_streams(n: int, kind: torch.dtype) -> None:
    """Kimi-K3's nine streams."""
    count, at, hidden, of_reading = (
        empty(1, dtype=i32),
        empty(n, dtype=i32),
        MIXED_HIDDEN,
        empty(3, dtype=i32),
    )
    x, y = empty(n, 9 * hidden), GpuActivations(*both(n, hidden, kind))
    w = StreamAttention(empty(hidden), empty(hidden), of_reading)
    parts, shares, ids = empty(n, PARTS, hidden, dtype=kind), empty(n, PARTS), empty(n, PARTS, dtype=i32)
    for block in (
        PlacedBlock(parts, shares, ids, empty(n, hidden), of_reading),
        PlacedBlock(empty(n, 1, hidden, dtype=kind), None, None, None, of_reading),
    ):
        attend_streams(x, block, None, w, count, 1e-5, y, empty(n, hidden))
        add_block(x, block, count)
    for rows in (None, at):
        attend_streams(x, None, rows, w, count, 1e-5, y, None)


def ngram_embeddings(n: int, kind: torch.dtype) -> None:
    at, width, taps, dilation = empty(n, dtype=i32), STREAMS * HIDDEN, 4, 3
    products = empty(n, width + HIDDEN, dtype=kind)
    tensors = NgramTensors(products[:, :width], products[:, width:], empty(n, STREAMS), empty(n, width))
    norms = NgramNorms(empty(width), empty(width), empty(width))
    states = empty(3, (taps - 1) * dilation * width)
    add_ngrams(
        empty(n, width), tensors, norms, empty(taps, width), dilation, 1e-6, states,
        StepSequences(at, at, at, at), empty(1, dtype=i32),
    )  # fmt: skip
