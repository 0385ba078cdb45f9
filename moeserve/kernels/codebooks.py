"""Passes codebooks to the C++ engine, which contains none, when the first matrix of a type with a codebook is
loaded."""

from __future__ import annotations

from functools import cache

from moeserve.kernels import _C
from moeserve.quantization import QUANT_TYPES
from moeserve.quantization.codebook import entries_of


@cache
def bring_codebook(ggml_type: int) -> None:
    """Passes the type's codebook to the engine, before it reads or packs rows of the type. Does nothing for other
    types. ggml_type: ggml's number of the weights' type."""
    row = QUANT_TYPES.get(ggml_type)
    if row is not None and row.codebook is not None:
        _C.set_codebook(ggml_type, entries_of(row.name).reshape(-1))
