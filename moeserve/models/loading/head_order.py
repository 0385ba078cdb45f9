"""Reorders q's and k's RoPE dimensions from pairs of neighbours (https://arxiv.org/abs/2104.09864), as some files store
them, into split halves, as the kernels rotate them. Attention scores do not depend on the order. Rows of matrices, and
entries of biases and norms, are reordered once, on loading."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from moeserve.models.attention import AttentionShape
from moeserve.models.interface import ModelShape
from moeserve.models.sources.gguf import names as n

_ORDERED = frozenset((n.ATTN_Q, n.ATTN_K, n.ATTN_Q_NORM, n.ATTN_K_NORM))
Rows = TypeVar("Rows", npt.NDArray[Any], torch.Tensor)


def is_reordered(shape: ModelShape, name: str) -> bool:
    """Returns whether the tensor with this full name is stored in pairs."""
    return _order(shape, name) is not None


def in_halves(shape: ModelShape, name: str, rows: Rows) -> Rows:
    """Returns a tensor's rows (heads one after another, [heads * head_dim, ...]) as split halves: a copy, or the
    rows themselves if they are not stored in pairs."""
    order = _order(shape, name)
    if order is None:
        return rows
    by_head = rows.reshape(-1, len(order), *rows.shape[1:])
    return by_head[:, order].reshape(rows.shape)


def bytes_in_halves(
    shape: ModelShape, name: str, data: npt.NDArray[np.uint8], num_rows: int
) -> npt.NDArray[np.uint8]:
    """Returns a quantised matrix's bytes, flat uint8, with its rows in the order of `in_halves`; `data` itself if the
    matrix has no rows to reorder. data: flat uint8, `num_rows` contiguous rows."""
    if not is_reordered(shape, name):
        return data
    return in_halves(shape, name, data.reshape(num_rows, -1)).reshape(-1)


def _order(shape: ModelShape, name: str) -> npt.NDArray[np.int64] | None:
    """Returns the source index of each of a head's dimensions; None if the tensor is not reordered."""
    layer = n.layer_of(name)
    layers = shape.loaded_layers
    attention = None if layer is None or layer >= len(layers) else layers[layer].mixer
    if not isinstance(attention, AttentionShape) or not attention.in_pairs:
        return None
    if name.split(".")[2] not in _ORDERED:
        return None
    rotary = attention.rotary_dim
    rest = np.arange(rotary, attention.head_dim)
    return np.concatenate([np.arange(0, rotary, 2), np.arange(1, rotary, 2), rest])
