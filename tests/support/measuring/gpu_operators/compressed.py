"""Compressed attention, and experts by token id, of DeepSeek-V4's sizes."""

from __future__ import annotations

import torch

from moeserve.kernels.compressed.op import (
    WindowKeys,
    compress,
    compressed_attention,
    compressed_store,
    keep_keys,
)
from moeserve.kernels.compressed_operations import CompressorParameters, RowAngles
from moeserve.kernels.delta_net.op import StepSequences
from moeserve.kernels.routing.op import route
from moeserve.kernels.routing.options import RouterOptions
from tests.support.measuring.gpu_operators.tensors import empty, i32

HEADS, DIM, ROTARY, WINDOW, RING = 64, 512, 64, 128, 144
INDEX_HEADS, INDEX_DIM, TOP, EXPERTS, TOP_K = 64, 128, 512, 256, 6


def compressed(n: int, kind: torch.dtype) -> None:
    at, count, f16 = empty(n, dtype=i32), empty(1, dtype=i32), torch.float16
    angles, sequences = (
        RowAngles(empty(9, ROTARY // 2), empty(9, ROTARY // 2), at),
        StepSequences(at, at, at, at),
    )
    keys = WindowKeys(empty(900, 1, DIM, dtype=f16), empty(2, dtype=torch.int64), RING, WINDOW)
    queries, index_queries = empty(n, HEADS, DIM, dtype=f16), empty(n, INDEX_HEADS, INDEX_DIM, dtype=f16)
    q, index_q = empty(n, HEADS * DIM, dtype=kind), empty(n, INDEX_HEADS * INDEX_DIM, dtype=kind)
    of_row = (empty(n, DIM), empty(DIM), 1e-6, 0.1, angles, sequences, keys, count, queries)
    compressed_store(q, *of_row)
    compressed_store(q, *of_row, index_q, index_queries)
    for ratio, dim, overlaps in ((4, DIM, True), (4, INDEX_DIM, True), (128, DIM, False)):
        width = 2 * dim if overlaps else dim
        w, states = CompressorParameters(empty(ratio, width), empty(dim)), empty(3, 3 * width)
        products = empty(n, 2 * width)
        compress(
            products[:, :width], products[:, width:], w, 1e-6, angles, sequences, states, at, count,
            empty(50, 1, dim, dtype=f16),
        )  # fmt: skip
    table, chosen, out = (
        empty(3, 99_999, dtype=i32),
        empty(n, 1, TOP + 1, dtype=i32),
        empty(n, HEADS * DIM, dtype=kind),
    )
    for ratio, top in ((0, 0), (4, TOP), (128, 0)):
        compressed_attention(
            queries, keys, empty(HEADS), angles, sequences, table, at, ratio, chosen if top else None, top, count, out
        )  # fmt: skip
    keep_keys(keys, at, sequences)


def experts_by_token(n: int) -> None:
    count, at, logits = empty(1, dtype=i32), empty(n, dtype=i32), empty(n, EXPERTS)
    ids, local, weights = (empty(n, TOP_K, dtype=dtype) for dtype in (i32, i32, torch.float32))
    route(
        logits, empty(EXPERTS, dtype=i32), count, ids, local, weights, empty(EXPERTS, dtype=torch.int64),
        options=RouterOptions("sqrt_softplus", scale=1.5), by_token=(empty(129_280, TOP_K, dtype=i32), at),
    )  # fmt: skip
