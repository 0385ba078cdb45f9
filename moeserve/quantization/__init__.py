"""Quantization types: one row of one table each (`table.py`), from which everything else follows.

`quant_type.py` describes the layout of rows, `reference.py` dequantises them, `other_types.py` names the types that are
not read. Nothing here knows torch, so that readers of model files, placement and kernels all ask the same row. The C++
engine has its own list (`kernels/csrc/formats/quant_types.h`), which a test holds to this one.
docs/development/adding-a-quantization-type.md is the how-to.
"""

from moeserve.quantization.other_types import unsupported_type
from moeserve.quantization.quant_type import BitField, BlockLayout, CodeTable, QuantType, Scale, StoredScales
from moeserve.quantization.table import QUANT_TYPES, registered, supported_names

__all__ = [
    "QUANT_TYPES",
    "BitField",
    "BlockLayout",
    "CodeTable",
    "QuantType",
    "Scale",
    "StoredScales",
    "registered",
    "supported_names",
    "unsupported_type",
]
