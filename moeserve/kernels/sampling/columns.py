"""The columns of a request slot's row of parameters on a GPU: the declared settings, and what sampling itself keeps."""

from __future__ import annotations

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


def _layout() -> tuple[dict[str, tuple[int, np.dtype[np.generic]]], int]:
    """The offset, in words of 4 bytes, and the type of each column; the words of a row. Those of two words come first,
    so that they are aligned, and a row is a whole number of lines of 64 bytes."""
    types = {name: np.dtype(kind) for name, kind in _TYPES.items()}
    found, words = {}, 0
    for name in sorted(types, key=lambda name: -types[name].itemsize):
        found[name] = (words, types[name])
        words += types[name].itemsize // 4
    return found, -(-words // 16) * 16


_COLUMNS, _WORDS = _layout()
WORDS = tl.constexpr(_WORDS)


def column(name: str) -> tl.constexpr:
    """Where a row has it, for kernels: an offset in words."""
    return tl.constexpr(_COLUMNS[name][0])


def row(**values: float) -> npt.NDArray[np.int32]:
    """int32 [WORDS]: a row with a value for every column. KeyError for one that is missing."""
    words = np.zeros(_WORDS, np.int32)
    for name, (offset, kind) in _COLUMNS.items():
        words[offset : offset + kind.itemsize // 4] = np.array([values[name]], kind).view(np.int32)
    return words
