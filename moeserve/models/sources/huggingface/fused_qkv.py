"""Attention's q, k and v in one tensor of a checkpoint, cut into the three of a GGUF."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy.typing as npt

from moeserve.models.errors import ModelError
from moeserve.models.sources.gguf import Metadata
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.fused_qkv import qkv_rows

from .made_tensor import MadeTensor, rows_made
from .remade import Made
from .safetensors_file import StoredTensor

_PARTS = (n.ATTN_Q, n.ATTN_K, n.ATTN_V)


def fused_qkv(theirs: str) -> Made:
    """Returns a function that cuts `theirs`.weight, within a layer, into q, k and v: rows of q, then k, then v."""

    def made(
        path: Path, prefix: str, metadata: Metadata, stored: dict[str, StoredTensor]
    ) -> Iterator[tuple[str, MadeTensor]]:
        tensor = stored.pop(f"{prefix}{theirs}.weight", None)
        if tensor is None:
            return  # a checkpoint with three tensors
        rows = qkv_rows(metadata)
        if rows is None or len(tensor.shape) != 2 or sum(rows) != tensor.shape[0]:
            shape = list(tensor.shape)
            raise ModelError(
                path,
                f"tensor {tensor.name!r} has shape {shape}, which the heads do not fit; download the model again",
            )
        for part, (first, end) in zip(_PARTS, pairwise(accumulate(rows, initial=0)), strict=True):
            yield n.of_part(part), rows_made(tensor, (end - first, tensor.shape[1]), _rows(first, end))

    return made


def _rows(first: int, end: int) -> Callable[[npt.NDArray[Any]], npt.NDArray[Any]]:
    return lambda values: values[first:end]
