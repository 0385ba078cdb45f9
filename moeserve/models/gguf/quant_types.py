"""The tensor types we serve, one row each: the only list of them in the project.

Block sizes (values per block) and type sizes (bytes per block) are gguf-py's, which are ggml's.
"""

from __future__ import annotations

from typing import NamedTuple

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType


class QuantType(NamedTuple):
    type: GGMLQuantizationType
    block_size: int  # values in a block; the innermost dimension is a multiple of it
    type_size: int  # bytes of a block

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` values, a multiple of block_size."""
        return columns // self.block_size * self.type_size


_SERVED = (
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
)

QUANT_TYPES: dict[GGMLQuantizationType, QuantType] = {
    member: QuantType(member, *GGML_QUANT_SIZES[member])
    for member in map(GGMLQuantizationType.__getitem__, _SERVED)
}

UNQUANTISED = frozenset({GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16})


def type_name(number: int) -> str:
    """ggml's name of a type number; the number itself where gguf-py does not know it."""
    try:
        return str(GGMLQuantizationType(number).name)
    except ValueError:
        return f"number {number}"
