"""Rotary dimensions of q and k that a file has as pairs of neighbours (https://arxiv.org/abs/2104.09864), in the order
of halves that kernels rotate. Scores are the same whatever the order of dimensions, so that loading changes it, once:
of matrices the rows, of biases and norms the numbers."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from moeserve.models.interface import AttentionShape, ModelShape
from moeserve.models.sources.gguf import names as n

_ORDERED = frozenset((n.ATTN_Q, n.ATTN_K, n.ATTN_Q_NORM, n.ATTN_K_NORM))
Rows = TypeVar("Rows", npt.NDArray[Any], torch.Tensor)


def is_reordered(shape: ModelShape, name: str) -> bool:
    """Whether the tensor of this full name has dimensions of heads in pairs."""
    return _order(shape, name) is not None


def in_halves(shape: ModelShape, name: str, rows: Rows) -> Rows:
    """A tensor's rows (any number of heads one after another, [heads * head_dim, ...]) in the order of halves: a copy;
    or themselves, where they are no pairs."""
    order = _order(shape, name)
    if order is None:
        return rows
    by_head = rows.reshape(-1, len(order), *rows.shape[1:])
    return by_head[:, order].reshape(rows.shape)


def bytes_in_halves(
    shape: ModelShape, name: str, data: npt.NDArray[np.uint8], num_rows: int
) -> npt.NDArray[np.uint8]:
    """Returns what `in_halves` does, for the bytes of a quantised matrix: `data` holds `num_rows` contiguous rows."""
    if not is_reordered(shape, name):
        return data
    return in_halves(shape, name, data.reshape(num_rows, -1)).reshape(-1)


def _order(shape: ModelShape, name: str) -> npt.NDArray[np.int64] | None:
    """Where each of a head's dimensions comes from."""
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
