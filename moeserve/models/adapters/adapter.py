"""An adapter in memory: for each product that it changes, the two matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

KEY_BYTES = 16  # of Adapter.key
FLOAT32_BYTES = 4


class ProductKey(NamedTuple):
    layer: int
    part: str  # products.py
    expert: int = 0


class LowRank(NamedTuple):
    """A low-rank change: b (a x) is added to W x."""

    a: Floats  # [rank, cols]
    b: Floats  # [rows, rank], the adapter's scale multiplied in


@dataclass(frozen=True, slots=True)
class Adapter:
    name: str
    key: str  # of its files' bytes
    products: dict[ProductKey, LowRank]

    @property
    def num_bytes(self) -> int:
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.products.values())

    @property
    def rank(self) -> int:
        """The largest."""
        return max(len(pair.a) for pair in self.products.values())
