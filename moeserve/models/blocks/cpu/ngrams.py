"""N-gram embeddings on the pool's stream: x += factors * value + silu(convolution). The last few tokens of the text
choose rows of a table, from which keys and values are computed (kernels/ngrams/reference.py)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.stream_operands import StateLayer
from moeserve.models.blocks.cpu.workspace import CpuBatch, CpuWorkspace
from moeserve.models.interface import ModelShape
from moeserve.models.loading.cpu_weights import CpuNgrams
from moeserve.models.residual import NgramShape

Int32s = npt.NDArray[np.int32]


def look_up(
    stream: CpuStream, w: CpuNgrams, shape: NgramShape, tokens: Int32s, previous: Int32s, space: CpuWorkspace
) -> None:
    """Reads the tokens' rows of the table, from RAM or the file, and launches their conversion. tokens, previous: see
    `NgramHashes.rows`."""
    assert space.ngrams is not None
    rows = w.table.take(tokens, previous)
    ids = torch.arange(len(rows), dtype=torch.int32)
    embedded = space.ngrams.embedded.view(-1, shape.head_width)
    stream.embed(rows, w.table.ggml_type, ids, len(rows), embedded)


def add_ngrams(
    stream: CpuStream,
    w: CpuNgrams,
    model: ModelShape,
    state: StateLayer,
    batch: CpuBatch,
    space: CpuWorkspace,
    pending: Tensor | None,
) -> None:
    """Launches the addition of the n-gram embeddings to x, after `look_up`. state: the convolution's state, which is
    advanced; pending: the convolution's draft record, if rows may have drafts, else None."""
    s, n, shape = space.ngrams, batch.n, model.ngrams
    assert s is not None
    assert shape is not None
    assert batch.states is not None
    stream.gelu_gate(None, s.embedded, 0, n, s.input)
    stream.linear(s.input, n, w.products, [s.keys, s.values])
    stream.ngram_gate(space.x, s.keys, s.values, w.norms, model.rms_eps, n, s.factors)
    stream.ngram_conv(
        s.keys, s.factors, s.values, w.conv, shape.hashes.size, state, batch.states, n, space.x, pending
    )
