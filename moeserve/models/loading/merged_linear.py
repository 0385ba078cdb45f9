"""The matrices of one product on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moeserve.kernels.planes import Planes


@dataclass(frozen=True, slots=True)
class MergedLinear:
    """One matrix, or two matrices of different types over the same input, by which a single launch multiplies. The
    output has the rows of the first, then those of the second."""

    first: Planes
    second: Planes | None = None
    bias: Tensor | None = None  # float32 [rows]; None: nothing is added
    # int32 [cols]: column j belongs to the input's column order[j]; None: to column j.
    order: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.first.rows + (0 if self.second is None else self.second.rows)

    @property
    def is_floats(self) -> bool:
        """Whether it is one matrix of floats, with neither bias nor column order."""
        return not self.first.quantised and self.second is None and self.bias is None and self.order is None

    @property
    def nbytes(self) -> int:
        return self.first.nbytes + (0 if self.second is None else self.second.nbytes)
