"""The activations that a GPU product reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GpuActivations:
    """Up to n rows of `cols` activations as floats and, for small batches, also as int8 with a scale per 32 columns.

    The integer products (`linear/gemv.py`) read `codes` and `scales`, all others read `x`. A form that no weight
    needs may be None.
    """

    x: Tensor | None  # float32, bfloat16 or float16 [n, cols]
    codes: Tensor | None  # int8 [n, cols]
    scales: Tensor | None  # float32 [n, cols / 32]

    @staticmethod
    def empty(
        rows: int, cols: int, device: torch.device | str, *, dtype: torch.dtype | None, quantised: bool
    ) -> GpuActivations:
        """Returns uninitialised activations [rows, cols] on the device; without floats if dtype is None, with int8
        codes and scales if quantised. cols: then a multiple of 32."""
        x = None if dtype is None else torch.empty(rows, cols, dtype=dtype, device=device)
        if not quantised:
            return GpuActivations(x, None, None)
        codes = torch.empty(rows, cols, dtype=torch.int8, device=device)
        return GpuActivations(x, codes, torch.empty(rows, cols // 32, device=device))
