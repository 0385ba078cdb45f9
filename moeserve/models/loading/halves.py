"""Packs a matrix as two, each with half of its columns."""

from __future__ import annotations

import numpy as np

from moeserve.kernels.cpu_stream import CpuStream, Matrix
from moeserve.models.errors import ModelError
from moeserve.models.interface import ModelShape
from moeserve.models.loading.head_order import bytes_in_halves
from moeserve.models.sources.source import ModelSource


def pack_halves(
    stream: CpuStream, source: ModelSource, name: str, shape: ModelShape | None = None
) -> tuple[Matrix, Matrix]:
    """Returns the left and the right half of a matrix's columns. shape: the model's shape, if the matrix's rows may be
    stored as RoPE's pairs (`head_order.py`). Raises ModelError if a quantised block spans both."""
    tensor = source.tensors[name]
    rows, cols = tensor.shape
    if cols // 2 % tensor.type.block_columns:
        raise ModelError(
            source.path,
            f"tensor {name!r}: half of its {cols} columns is not a whole number of {tensor.type.name} blocks; choose "
            "a file of other types, such as F16",
        )
    if tensor.order is not None:
        raise ModelError(
            source.path,
            f"tensor {name!r} has its columns in another order (desc_act), which is not supported here; choose a file "
            "without it",
        )
    stored = source.data(name)
    data = (stored if shape is None else bytes_in_halves(shape, name, stored, rows)).reshape(rows, 2, -1)
    left, right = (
        stream.pack(np.ascontiguousarray(data[:, half]).reshape(-1), int(tensor.type), (rows, cols // 2))
        for half in (0, 1)
    )
    return left, right
