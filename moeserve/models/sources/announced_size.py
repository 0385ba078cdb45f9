"""Finds a model's file that is shorter than its header says, as a download that broke off leaves it.

The launcher asks before it starts any process. Other readers would notice only when they come to the weights, seconds
later. NumPy is not imported, and nothing behind the headers is read.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from moeserve.models.errors import ModelError
from moeserve.models.sources.first_bytes import MAGIC
from moeserve.models.sources.model_files import models_of, split_names
from moeserve.models.sources.regular_file import map_file
from moeserve.models.sources.weight_files import weight_files
from moeserve.quantization import QUANT_TYPES
from moeserve.quantization.table import I32, I64

_VERSIONS: Final = (2, 3)
_STRING: Final = 8
_ARRAY: Final = 9
_SCALAR_BYTES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # by value type
_TYPES: Final = {I32.number: I32, I64.number: I64, **QUANT_TYPES}  # the reader refuses a file with any other
_ALIGNMENT: Final = b"general.alignment"
_MAX_ENTRIES: Final = 1 << 16  # keys, tensors
_MAX_RANK: Final = 4  # of a tensor; a file with another is left to its reader
_MAX_NAME: Final = 1 << 16  # bytes
_MAX_STRINGS: Final = 1 << 23  # in an array; skipping them takes 2 s
_MAX_JSON_BYTES: Final = 100_000_000  # safetensors' limit
_MAX_MODEL_BYTES: Final = 1 << 42  # a header that speaks of more is damaged
_UNITS: Final = (("GiB", 1 << 30), ("MiB", 1 << 20))


class _Entry(msgspec.Struct):
    data_offsets: tuple[int, int] = (0, 0)


def cut_short(model: Path) -> str | None:
    """Returns which of a model's files is shorter than its header says, with both sizes and the remedy; None if there
    is none, or if a file cannot be read, which its reader reports. model: a GGUF file, any file of a split set, or a
    folder."""
    for file in _files(model):
        if (announced := _announced_bytes(file)) is None:
            continue
        there = file.stat().st_size
        if there < announced <= _MAX_MODEL_BYTES:
            return f"{file}: has {_sizes(there, announced)}: its download broke off; download it again"
    return None


def _files(model: Path) -> Iterator[Path]:
    """Yields the model's files that are there; of a folder in Hugging Face's form none if its reader will refuse the
    index."""
    if (model / "config.json").exists():
        with suppress(ModelError):
            yield from weight_files(model)
        return
    named = [model.name]
    folder = model.parent
    if model.is_dir():
        folder = model
        named = models_of(file.name for file in model.glob("*.gguf"))[:1]
    for name in named:
        for part in split_names(name):
            if (folder / part).is_file():
                yield folder / part


def _announced_bytes(file: Path) -> int | None:
    """Returns the least number of bytes of which the file's header speaks; None if the header is cut off or damaged."""
    try:
        with map_file(file) as buffer:
            return _safetensors_bytes(buffer) if file.suffix == ".safetensors" else _gguf_bytes(buffer)
    except (OSError, ValueError, KeyError, struct.error, OverflowError, RecursionError):
        return None


def _safetensors_bytes(buffer: mmap.mmap) -> int:
    """Raises ValueError, struct.error."""
    (length,) = struct.unpack_from("<Q", buffer)
    if length > min(_MAX_JSON_BYTES, len(buffer) - 8):
        raise ValueError("the header is cut off")
    entries = msgspec.json.decode(buffer[8 : 8 + length], type=dict[str, msgspec.Raw])
    entries.pop("__metadata__", None)
    ends = (msgspec.json.decode(raw, type=_Entry).data_offsets[1] for raw in entries.values())
    return 8 + int(length) + max(ends, default=0)


def _gguf_bytes(buffer: mmap.mmap) -> int:
    """Raises ValueError, KeyError, struct.error, OverflowError."""
    walk = _Walk(buffer)
    if buffer[: len(MAGIC)] != MAGIC or walk.number("<4xI") not in _VERSIONS:
        raise ValueError("no GGUF file of a version that is read")
    tensors, keys = walk.count(), walk.count()
    alignment = 32
    for _ in range(keys):
        key, kind = walk.name(), walk.number("<I")
        if key == _ALIGNMENT:
            alignment = max(1, walk.number("<I"))
        else:
            walk.skip_value(kind)
    spans = []
    for _ in range(tensors):
        walk.skip_string()
        rank = walk.number("<I")
        if not 1 <= rank <= _MAX_RANK:
            raise ValueError("a number of dimensions that the reader refuses")
        shape = [walk.number("<Q") for _ in range(rank)]
        nbytes = _TYPES[walk.number("<I")].row_bytes(shape[0]) * math.prod(shape[1:])
        spans.append((walk.number("<Q"), nbytes))
    start = _padded(walk.position, alignment)
    if walk.position > len(buffer) or not _is_plausible(spans, alignment, len(buffer) - start):
        raise ValueError("a length or an offset is damaged")
    return start + max((offset + nbytes for offset, nbytes in spans), default=0)


def _is_plausible(spans: list[tuple[int, int]], alignment: int, there: int) -> bool:
    """Returns whether tensors can lie so in a file, which may be cut short. spans: their offsets and bytes; there: the
    bytes behind the header. False where two overlap, and where one ends behind the file's end though there is room
    for all: no download that broke off looks so."""
    end = 0
    for offset, nbytes in sorted(spans):
        if offset < end:
            return False
        end = offset + nbytes
    return end <= there or sum(_padded(nbytes, alignment) for _, nbytes in spans) > there


def _padded(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


class _Walk:
    """A cursor in a GGUF file's header. Its methods raise struct.error behind the file's end."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.position = 0
        self._buffer = buffer

    def number(self, form: str) -> int:
        (number,) = struct.unpack_from(form, self._buffer, self.position)
        self.position += struct.calcsize(form)
        return int(number)

    def count(self) -> int:
        count = self.number("<Q")
        if count > _MAX_ENTRIES:
            raise ValueError("too many keys or tensors")
        return count

    def name(self) -> bytes:
        start = self.position + 8
        self.skip_string()
        if self.position - start > _MAX_NAME:
            raise ValueError("the name is too long")
        return self._buffer[start : self.position]

    def skip_string(self) -> None:
        length = self.number("<Q")
        self.position += length

    def skip_value(self, kind: int) -> None:
        """Raises KeyError for an unknown type."""
        if kind == _STRING:
            self.skip_string()
        elif kind == _ARRAY:
            self._skip_array(self.number("<I"), self.number("<Q"))
        else:
            self.position += _SCALAR_BYTES[kind]

    def _skip_array(self, kind: int, count: int) -> None:
        if kind != _STRING:
            self.position += count * _SCALAR_BYTES[kind]
            return
        if count > _MAX_STRINGS:
            raise ValueError("too many strings")
        position, buffer, length_at = self.position, self._buffer, struct.Struct("<Q").unpack_from
        for _ in range(count):
            position += 8 + length_at(buffer, position)[0]
        self.position = position


def _sizes(there: int, announced: int) -> str:
    """Returns both sizes in a unit in which they differ."""
    for unit, size in _UNITS:
        first, second = f"{there / size:,.1f}", f"{announced / size:,.1f}"
        if announced >= size and first != second:
            return f"{first} of {second} {unit}"
    return f"{there:,} of {announced:,} bytes"
