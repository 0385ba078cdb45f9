"""The numbers of an adapter's tensors, whatever the file."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moeserve.models.adapters.adapter import Floats

TYPES = ("F32", "F16", "BF16")  # as both formats call them


def to_floats(numbers: npt.NDArray[Any], type_name: str) -> Floats:
    """numbers: unsigned, as wide as the type, one of TYPES."""
    if type_name == "BF16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.view(np.float32 if type_name == "F32" else np.float16).astype(np.float32)
