"""Separates the q matrix of gated attention, which contains for each head the rows of q, then those of its gate."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt


def rows_of(data: npt.NDArray[np.uint8], num_heads: int, part: Literal["q", "gate"]) -> npt.NDArray[np.uint8]:
    """Returns a contiguous copy of the bytes of all heads' q, or of all heads' gates, flat uint8. data: uint8, the
    bytes of a matrix whose rows are each head's q followed by its gate."""
    per_head = data.reshape(num_heads, 2, -1)
    return np.ascontiguousarray(per_head[:, ("q", "gate").index(part)]).reshape(-1)
