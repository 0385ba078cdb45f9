"""Splits tensors in which a checkpoint has several matrices, one after another, into the matrices of a GGUF."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy.typing as npt

from moeserve.models.errors import ModelError
from moeserve.models.sources.gguf import Metadata
from moeserve.models.sources.gguf import names as n

from .made_tensor import MadeTensor, rows_made
from .remade import Made
from .safetensors_file import StoredTensor

# The rows of each matrix, from the rows of all and the layer; None if the metadata does not fit.
RowsOf = Callable[[Metadata, int, int], Sequence[int] | None]


def fused_rows(theirs: str, parts: Sequence[str], rows_of: RowsOf) -> Made:
    """Returns a function that cuts `theirs`.weight, within a layer, into the matrices of `parts`."""

    def made(
        path: Path, prefix: str, metadata: Metadata, stored: dict[str, StoredTensor]
    ) -> Iterator[tuple[str, MadeTensor]]:
        tensor = stored.pop(f"{prefix}{theirs}.weight", None)
        if tensor is None:
            return  # a checkpoint with a tensor for each
        rows = rows_of(metadata, tensor.shape[0], layer_of(prefix)) if len(tensor.shape) == 2 else None
        if rows is None or sum(rows) != tensor.shape[0]:
            shape = list(tensor.shape)
            raise ModelError(
                path,
                f"tensor {tensor.name!r} has shape {shape}, which does not fit config.json; download the model again",
            )
        for part, (first, end) in zip(parts, pairwise(accumulate(rows, initial=0)), strict=True):
            yield n.of_part(part), rows_made(tensor, (end - first, tensor.shape[1]), _rows(first, end))

    return made


def fused_gate_up(theirs: str) -> Made:
    """Returns a function that cuts a feed-forward's `theirs`.weight, within a layer, into gate and up."""
    return fused_rows(theirs, (n.FFN_GATE, n.FFN_UP), _gate_up_rows)


def layer_of(prefix: str) -> int:
    """Returns the layer of the names that begin with `prefix`: "model.layers.3." or "3."."""
    return int(prefix.removesuffix(".").rpartition(".")[2])


def _gate_up_rows(metadata: Metadata, _rows: int, _layer: int) -> tuple[int, int] | None:
    width = metadata.get(f"{metadata.get('general.architecture')}.feed_forward_length")
    return (width, width) if isinstance(width, int) else None


def _rows(first: int, end: int) -> Callable[[npt.NDArray[Any]], npt.NDArray[Any]]:
    return lambda values: values[first:end]
