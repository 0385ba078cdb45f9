"""N-gram embeddings on a GPU: the host looks up the table's rows before a step, and the step adds them to the
streams; the same as blocks/cpu/ngrams.py."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels import _C
from moeserve.kernels.latent.op import norm_rows
from moeserve.kernels.ngrams.op import NgramTensors
from moeserve.kernels.ngrams.op import add_ngrams as launch
from moeserve.kernels.stream_operands import StateLayer
from moeserve.models.blocks.gpu.linear import multiply_all
from moeserve.models.blocks.gpu.residual_workspace import NgramWorkspace
from moeserve.models.blocks.gpu.workspace import GpuStateRows, GpuWorkspace
from moeserve.models.interface import ModelShape
from moeserve.models.loading.gpu_weights import GpuNgrams

Int32s = npt.NDArray[np.int32]


def look_up(w: GpuNgrams, tokens: Int32s, previous: Int32s, space: NgramWorkspace) -> None:
    """Reads the tokens' rows of the table, from RAM or the file, and launches their copy to the GPU. tokens, previous:
    see `NgramHashes.rows`."""
    rows = w.table.take(tokens, previous)
    into = space.embedded[: len(tokens)]
    embedded = torch.empty(into.shape, pin_memory=into.is_cuda)
    _C.dequantize_row(w.table.ggml_type, rows.ctypes.data, embedded.numel(), embedded.data_ptr())
    into.copy_(embedded, non_blocking=True)  # torch keeps pinned memory until the copy is done


def add_ngrams(
    w: GpuNgrams, model: ModelShape, state: StateLayer, rows: GpuStateRows, count: Tensor, s: GpuWorkspace
) -> None:
    """Launches s.x += the n-gram embeddings that `look_up` has placed, and advances the sequences' states. state: the
    convolution's. count: int32 [1] on the device, the number of valid rows."""
    space, shape = s.ngrams, model.ngrams
    assert space is not None
    assert shape is not None
    a = space.input
    norm_rows(space.embedded, None, 0.0, count, a.x, a.codes, a.scales)
    widths = (model.residual_width, model.hidden_size)
    key, value = multiply_all(w.products, widths, a, count, space.products, s.dense)
    tensors = NgramTensors(key, value, space.factors, space.inputs)
    states = state.states[:, state.first :]
    dilation = shape.hashes.size
    launch(s.x, tensors, w.norms, w.conv, dilation, model.rms_eps, states, rows.sequences, count)
