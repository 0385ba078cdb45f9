"""Codebooks for the C++ engine, which has none of its own: the first matrix of a type with a codebook brings its
entries."""

from __future__ import annotations

from functools import cache

from moeserve.kernels import _C
from moeserve.quantization import QUANT_TYPES
from moeserve.quantization.codebook import entries_of


@cache
def bring_codebook(ggml_type: int) -> None:
    """Before the engine reads or packs rows of the type; nothing where it has no codebook."""
    row = QUANT_TYPES.get(ggml_type)
    if row is not None and row.codebook is not None:
        _C.set_codebook(ggml_type, entries_of(row.name).reshape(-1))
