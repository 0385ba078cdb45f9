"""A model's metadata under GGUF's keys: typed getters with range checks; string arrays are decoded on demand."""

from __future__ import annotations

import mmap
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moeserve.models.errors import GGUF_REMEDY, ModelError

from .errors import GGUFError

_U64 = struct.Struct("<Q")


class StringArray(ABC):
    """An array of strings as bytes, not necessarily UTF-8."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[bytes]: ...


class MappedStrings(StringArray):
    """An array of strings in the mapped file, whose bounds were checked when the header was read.

    The strings are decoded on demand: a vocabulary has hundreds of thousands of them, and two of four processes never
    read it.
    """

    def __init__(self, buffer: mmap.mmap, offset: int, count: int) -> None:
        self._buffer = buffer
        self._offset = offset  # of the first string's length
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        buffer, position, length_at = self._buffer, self._offset, _U64.unpack_from
        for _ in range(self._count):
            start = position + 8
            position = start + length_at(buffer, position)[0]
            yield buffer[start:position]


MetadataValue = int | float | bool | str | StringArray | np.ndarray[Any, np.dtype[Any]]


class Metadata(Mapping[str, MetadataValue]):
    """Key → int, float, bool, str, StringArray, or a read-only numpy array.

    The getters raise the error made by `complain`, which names the file and the key, if the key is missing (without
    default), of another type, or out of range.
    """

    def __init__(
        self,
        path: Path,
        values: dict[str, MetadataValue],
        complain: Callable[[Path, str, str], ModelError] | None = None,
    ) -> None:
        """complain(path, key, problem): makes the error, in the terms of the file's format."""
        self.path = path
        self._values = values
        self._complain = complain or _gguf_error

    def __getitem__(self, key: str) -> MetadataValue:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def error(self, key: str, problem: str) -> ModelError:
        return self._complain(self.path, key, problem)

    def require_int(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Returns an integer within low..high."""
        value = self._lookup(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, f"is {_describe(value)}, an integer is expected")
        if not low <= value <= high:
            raise self.error(key, f"is {value}; {low} to {high} is supported")
        return value

    def require_float(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Returns a finite number within low..high."""
        value = self._lookup(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(key, f"is {_describe(value)}, a number is expected")
        if not low <= value <= high:  # also refuses NaN
            raise self.error(key, f"is {value}; {low} to {high} is supported")
        return float(value)

    def require_bool(self, key: str, default: bool | None = None) -> bool:
        value = self._lookup(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {_describe(value)}, a boolean is expected")
        return value

    def require_str(self, key: str, default: str | None = None) -> str:
        value = self._lookup(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"is {_describe(value)}, a string is expected")
        return value

    def require_strings(self, key: str) -> StringArray:
        value = self._lookup(key, None)
        if not isinstance(value, StringArray):
            raise self.error(key, f"is {_describe(value)}, an array of strings is expected")
        return value

    def require_ints(self, key: str, length: int) -> np.ndarray[Any, np.dtype[Any]]:
        """Returns the metadata's integer array of exactly `length` entries, of any integer dtype. Raises the error of a
        missing or unsuitable key (ModelError) otherwise."""
        value = self._lookup(key, None)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            raise self.error(key, f"is {_describe(value)}, an array of integers is expected")
        if len(value) != length:
            raise self.error(key, f"has {len(value)} entries, {length} are expected")
        return value

    def require_floats(self, key: str, length: int) -> np.ndarray[Any, np.dtype[Any]]:
        """Returns a float array of exactly `length` numbers without NaN."""
        value = self._lookup(key, None)
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
            raise self.error(key, f"is {_describe(value)}, an array of numbers is expected")
        if len(value) != length:
            raise self.error(key, f"has {len(value)} entries, {length} are expected")
        if np.isnan(value).any():
            raise self.error(key, "holds what is not a number")
        return value

    def require_bools(self, key: str, length: int) -> list[bool]:
        """Returns a boolean array of exactly `length` entries."""
        value = self._lookup(key, None)
        if not isinstance(value, np.ndarray) or value.dtype.kind != "b":
            raise self.error(key, f"is {_describe(value)}, an array of booleans is expected")
        if len(value) != length:
            raise self.error(key, f"has {len(value)} entries, {length} are expected")
        return [bool(entry) for entry in value]

    def require_ids(self, key: str, size: int) -> list[int]:
        """Returns an integer array of any length with entries in 0 .. size - 1."""
        value = self._lookup(key, None)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            raise self.error(key, f"is {_describe(value)}, an array of integers is expected")
        if len(value) and not 0 <= int(value.min()) <= int(value.max()) < size:
            raise self.error(key, f"is {value.tolist()}; 0 to {size - 1} is supported")
        return [int(entry) for entry in value]

    def _lookup(self, key: str, default: MetadataValue | None) -> MetadataValue:
        value = self._values.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        return value


def _gguf_error(path: Path, key: str, problem: str) -> ModelError:
    return GGUFError(path, f"metadata key {key!r} {problem}; {GGUF_REMEDY}")


def _describe(value: MetadataValue) -> str:
    if isinstance(value, StringArray):
        return f"an array of {len(value)} strings"
    if isinstance(value, np.ndarray):
        return f"an array of {len(value)} {value.dtype}"
    if isinstance(value, str) and len(value) > 40:
        return f"a string of {len(value)} characters"
    return f"{value!r}"
