"""The columns of a request slot's row of parameters on a GPU: the declared settings, and what sampling itself keeps."""

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
    "dry": "uint64",  # the address of the slot's record (dry.py), 0: none
    "dry_room": "int32",  # tokens that it holds
    "order": "int32",  # of the samplers (`order_code`)
    "num_bias": "int32",
    "num_stop": "int32",
    "min_tokens": "int32",
    "num_output": "int32",  # sampling writes it
    "history_row": "int32",  # -1: no penalties
}


# Columns of 8 bytes come first: they are aligned. A row is whole lines of 64 bytes.
_NAMES: Final = sorted(_TYPES, key=lambda name: -np.dtype(_TYPES[name]).itemsize)
_USED: Final = struct.Struct("<" + "".join(np.dtype(_TYPES[name]).char for name in _NAMES).replace("L", "Q"))
_OFFSETS: Final = {name: struct.calcsize(f"<{_USED.format[1 : 1 + i]}") // 4 for i, name in enumerate(_NAMES)}
NUM_OUTPUT: Final = _OFFSETS["num_output"]  # for the host, in words
WORDS = tl.constexpr(-(-_USED.size // 64) * 16)


def column(name: str) -> tl.constexpr:
    """Where a row has it, for kernels: an offset in words of 4 bytes."""
    return tl.constexpr(_OFFSETS[name])


def row(**values: float) -> npt.NDArray[np.int32]:
    """int32 [WORDS]: a row with a value for every column. KeyError for one that is missing. Every new request needs
    one, so it is made at once, not column by column."""
    words = bytearray(_USED.size + -_USED.size % 64)
    _USED.pack_into(words, 0, *[values[name] for name in _NAMES])
    return np.frombuffer(words, np.int32)
