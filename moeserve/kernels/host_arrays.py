"""Addresses of numpy arrays for the C++ engine. Raises ValueError, with a message that begins with the argument's
name, for another element type or an array that is not contiguous."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def gguf_rows(array: npt.NDArray[np.uint8], name: str) -> tuple[int, int]:
    """Returns the address of a contiguous uint8 array, and its number of bytes. name: for the error message. Raises as
    `check_array` does."""
    check_array(array, name, np.uint8)
    return array.ctypes.data, array.nbytes


def check_array(array: npt.NDArray[np.generic], name: str, dtype: type[np.generic]) -> None:
    if array.dtype != dtype:
        raise ValueError(f"{name}: {np.dtype(dtype)} wanted, not {array.dtype}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: a contiguous array wanted")
