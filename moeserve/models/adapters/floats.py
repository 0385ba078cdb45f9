"""Converts the numbers of an adapter's tensors, for both file formats."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moeserve.models.adapters.adapter import Floats

TYPES = ("F32", "F16", "BF16")  # as both formats call them


def to_floats(numbers: npt.NDArray[Any], type_name: str) -> Floats:
    """Returns the numbers as float32. numbers: the bits as unsigned integers of the type's width. type_name: one of
    TYPES."""
    if type_name == "BF16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.view(np.float32 if type_name == "F32" else np.float16).astype(np.float32)
