"""GGUF's types as gguf-py knows them, and by hand those that its installed version lacks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

# Name, number, and columns and bytes of a block, as in ggml's headers: what gguf-py may not know yet.
NEWEST = {41: ("Q1_0", (128, 18)), 42: ("Q2_0", (64, 18))}


def ggml_type(number: int) -> GGMLQuantizationType:
    """gguf-py's member of this number, or one like it."""
    if number not in NEWEST:
        return GGMLQuantizationType(number)
    member = int.__new__(GGMLQuantizationType, number)
    member._name_, member._value_ = NEWEST[number][0], number
    return member


def ggml_sizes(number: int) -> tuple[int, int]:
    """Columns and bytes of a block."""
    return NEWEST[number][1] if number in NEWEST else GGML_QUANT_SIZES[GGMLQuantizationType(number)]


def ggml_values(number: int, blocks: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    """uint8 rows of whole blocks [.., bytes], or floats of the type's own, dequantised: float32 [.., columns]."""
    if number not in NEWEST:
        return quants.dequantize(blocks, GGMLQuantizationType(number)).astype(np.float32)
    _, (columns, nbytes) = NEWEST[number]
    parts = blocks.view(np.uint8).reshape(-1, nbytes)
    d = np.ascontiguousarray(parts[:, :2]).view(np.float16).astype(np.float32)
    bits = np.unpackbits(parts[:, 2:], axis=1, bitorder="little").astype(np.float32)
    numbers = 2 * bits - 1 if columns == 128 else bits[:, ::2] + 2 * bits[:, 1::2] - 1
    return (d * numbers).astype(np.float32).reshape(*blocks.shape[:-1], -1)
