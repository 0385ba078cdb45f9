"""The columns of a request slot's parameter row on a GPU: the declared settings, and the sampler's own state."""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt
import triton.language as tl

from moeserve.sampling.parameters import PARAMETERS

_TYPES: Final[dict[str, npt.DTypeLike]] = {
    **{name: parameter.column for name, parameter in PARAMETERS.items()},
    "seed": "uint64",
    "dry": "uint64",  # address of the slot's record (dry.py); 0: none
    "dry_room": "int32",  # tokens that the record holds at most
    "order": "int32",  # order of the samplers (`order_code`)
    "num_bias": "int32",
    "num_stop": "int32",
    "min_tokens": "int32",
    "num_output": "int32",  # written by sampling
    "history_row": "int32",  # -1: no penalties
}


# Columns of 8 bytes come first, so that they are aligned. A row is a multiple of 64 bytes, a cache line.
_NAMES: Final = sorted(_TYPES, key=lambda name: -np.dtype(_TYPES[name]).itemsize)
_USED: Final = struct.Struct("<" + "".join(np.dtype(_TYPES[name]).char for name in _NAMES).replace("L", "Q"))
_OFFSETS: Final = {name: struct.calcsize(f"<{_USED.format[1 : 1 + i]}") // 4 for i, name in enumerate(_NAMES)}
NUM_OUTPUT: Final = _OFFSETS["num_output"]  # offset in words, for the host
WORDS = tl.constexpr(-(-_USED.size // 64) * 16)


def column(name: str) -> tl.constexpr:
    """Returns a column's offset in the row, in words of 4 bytes; for kernels."""
    return tl.constexpr(_OFFSETS[name])


def row(**values: float) -> npt.NDArray[np.int32]:
    """Returns int32 [WORDS]: a row with a value for every column. Raises KeyError for a missing one. Built in one
    go, because every new request needs one."""
    words = bytearray(_USED.size + -_USED.size % 64)
    _USED.pack_into(words, 0, *[values[name] for name in _NAMES])
    return np.frombuffer(words, np.int32)
