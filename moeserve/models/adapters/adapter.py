"""An adapter in memory: the two matrices of each product that it changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

KEY_BYTES = 16  # bytes of Adapter.key
FLOAT32_BYTES = 4


class ProductKey(NamedTuple):
    layer: int
    part: str  # a name of products.py
    expert: int = 0


class LowRank(NamedTuple):
    """A low-rank change: b (a x) is added to the product W x."""

    a: Floats  # [rank, cols]
    b: Floats  # [rows, rank], already multiplied by the adapter's scale


@dataclass(frozen=True, slots=True)
class Adapter:
    name: str
    key: str  # digest of the adapter's files
    products: dict[ProductKey, LowRank]

    @property
    def num_bytes(self) -> int:
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.products.values())

    @property
    def rank(self) -> int:
        """The largest rank of the adapter's products."""
        return max(len(pair.a) for pair in self.products.values())
