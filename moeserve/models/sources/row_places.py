"""Where the rows of a table are in mapped memory, for code in C++ that reads single rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class RowPart(NamedTuple):
    """Rows that follow those of the part before: row i is at address + i * factor % modulus * stride."""

    address: int
    rows: int
    stride: int
    factor: int
    modulus: int


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """All rows of a table, in order."""

    parts: tuple[RowPart, ...]
    memory: tuple[Bytes, ...]  # keeps the parts' memory mapped
    scaled_block: int = (
        0  # 8-bit floats: columns of a block of GGUF's form, which begins with `scale`; else 0
    )
    scale: float = 1.0

    @classmethod
    def of(cls, *matrices: Bytes) -> RowPlaces:
        """Returns the places of matrices' rows, uint8 [rows, bytes of a row] each."""
        parts = (RowPart(m.ctypes.data, len(m), m.shape[1], 1, max(1, len(m))) for m in matrices)
        return cls(tuple(parts), matrices)

    def scaled(self, block: int, scale: float) -> RowPlaces:
        return replace(self, scaled_block=block, scale=scale)
