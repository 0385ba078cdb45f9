"""Reads small tensors as float32, whatever the file's type."""

from __future__ import annotations

import torch

from moeserve.kernels import _C
from moeserve.kernels.codebooks import bring_codebook
from moeserve.models.sources.source import ModelSource


def read_floats(source: ModelSource, name: str) -> torch.Tensor:
    """Returns the tensor as float32, in its own shape."""
    tensor = source.tensors[name]
    out = torch.empty(tensor.shape)
    bring_codebook(int(tensor.type))
    data = source.data(name)  # keeps the bytes alive until the call returns
    _C.dequantize_row(int(tensor.type), data.ctypes.data, out.numel(), out.data_ptr())
    return out
