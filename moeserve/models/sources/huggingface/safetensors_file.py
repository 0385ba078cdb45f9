"""Checks and maps one .safetensors file. Format: https://huggingface.co/docs/safetensors."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from moeserve.models.errors import ModelError, SettingError
from moeserve.models.sources.regular_file import FileVersion, map_version
from moeserve.quantization import QUANT_TYPES, QuantType
from moeserve.quantization.table import BF16, F32

# Safetensors' names are ggml's.
TYPES = {row.name: row for row in QUANT_TYPES.values() if not row.is_quantised}
FP8 = "F8_E4M3"  # read if it has scales
EXPONENTS = "F8_E8M0"  # scales that are powers of two
_OTHERS = {"U8": 1, "I8": 1, FP8: 1, EXPONENTS: 1, "I32": 4, "I64": 8}
ITEM_BYTES = {name: row.block_bytes for name, row in TYPES.items()} | _OTHERS
_LENGTH = struct.Struct("<Q")  # the header's length, at the beginning of the file


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix of integers or small floats, stored as several tensors."""

    type: QuantType
    make: Callable[[], np.ndarray[Any, np.dtype[np.uint8]]]  # returns its blocks: uint8 [rows, row bytes]
    sources: tuple[StoredTensor, ...]
    # int32 [cols]: the blocks' column j is the matrix's column order[j]. None: as they come.
    order: npt.NDArray[np.int32] | None = None
    rows: npt.NDArray[np.int32] | None = None  # the same of rows: down_order.py


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a mapped safetensors file: bytes start .. end - 1, rows contiguous."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # safetensors' name
    start: int
    end: int
    buffer: mmap.mmap
    version: FileVersion  # of the mapped file
    scales: StoredTensor | None = None  # of an 8-bit float matrix, per `block` of rows and columns
    block: tuple[int, int] = (0, 0)
    packed: PackedWeight | None = None  # then `shape` is the matrix's, and start .. end are its codes' bytes

    @property
    def type(self) -> QuantType:
        """Returns the type as which rows are read. Raises ModelError if the tensor neither is of floats nor has
        scales."""
        return self.float_type if self.packed is None else self.packed.type

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """Returns the file's tensors from which this tensor is read: itself, with its scales if it has any, or the
        packed parts."""
        if self.packed is not None:
            return self.packed.sources
        return (self,) if self.scales is None else (self, self.scales)

    @property
    def float_type(self) -> QuantType:
        """Returns the type as which single values are read. Raises ModelError if the tensor is not of floats."""
        if self.scales is not None:
            return BF16
        if self.packed is not None:
            return F32
        if self.dtype not in TYPES:
            raise ModelError(
                self.path,
                f"tensor {self.name!r} is of type {self.dtype}, without scales that this version knows; read unscaled "
                f"are {', '.join(TYPES)}: choose a checkpoint in a supported quantisation, or a GGUF file",
            )
        return TYPES[self.dtype]


def release_pages(tensor: StoredTensor) -> None:
    """Releases the mapped pages of the file's tensors from which `tensor` is read, except those shared with a
    neighbour. The bytes stay readable."""
    for part in tensor.parts:
        start = -(-part.start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = part.end // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end:
            part.buffer.madvise(mmap.MADV_DONTNEED, start, end - start)


def read_tensors(path: Path, most_header_bytes: int | None = None) -> tuple[int, dict[str, StoredTensor]]:
    """Returns the file's size in bytes and its tensors by name. Raises ModelError. most_header_bytes: None: the
    library's limit.

    The library checks the header (at most 100 MB): types, shapes, no gaps or overlaps. It does not tell the tensors'
    offsets, so the header is parsed once more, from the mapped bytes.
    """
    try:
        buffer, version = map_version(path)
        (length,) = _LENGTH.unpack_from(buffer)
        if most_header_bytes is not None and length > most_header_bytes:
            raise SettingError(
                path, f"has a header of {length} bytes; {most_header_bytes} at most are expected"
            )
        with safe_open(path, framework="numpy"):
            pass
        header = msgspec.json.decode(
            buffer[_LENGTH.size : _LENGTH.size + length], type=dict[str, msgspec.Raw]
        )
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
    except (SafetensorError, msgspec.MsgspecError, struct.error, RecursionError) as error:
        raise ModelError(
            path, f"is damaged or not a safetensors file ({error}); download it again"
        ) from error
    except OSError as error:
        raise ModelError(
            path, f"cannot be opened: {error.strerror or error}; let the server's user read it"
        ) from error
    base = _LENGTH.size + length
    tensors = {name: _stored(path, name, entry, buffer, version, base) for name, entry in entries.items()}
    return len(buffer), tensors


def _stored(
    path: Path, name: str, entry: _Entry, buffer: mmap.mmap, version: FileVersion, base: int
) -> StoredTensor:
    start, end = (base + offset for offset in entry.data_offsets)
    nbytes = end - start  # for a type unknown here
    if entry.dtype in ITEM_BYTES:
        nbytes = math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
    if not (base <= start <= end <= len(buffer) and end - start == nbytes):
        raise SettingError(
            path, f"tensor {name!r} has offsets that do not match its shape; the file has changed"
        )
    return StoredTensor(path, name, tuple(entry.shape), entry.dtype, start, end, buffer, version)


def stored_bytes(tensor: StoredTensor) -> npt.NDArray[np.uint8]:
    """Returns the bytes of a matrix, uint8 [rows, bytes of a row]; a view of the file."""
    data = np.frombuffer(tensor.buffer, np.uint8, tensor.end - tensor.start, tensor.start)
    return data.reshape(tensor.shape[0], -1)


def stored_numbers(tensor: StoredTensor) -> npt.NDArray[Any]:
    """Returns the tensor's elements as unsigned integers of the same width (uint8 to uint64), in its shape; a view of
    the file."""
    data = np.frombuffer(tensor.buffer, np.uint8, tensor.end - tensor.start, tensor.start)
    item = data.nbytes // max(1, math.prod(tensor.shape))
    # A header of odd length leaves numbers at odd addresses; numpy can read these.
    return data.view(f"<u{item}").reshape(tensor.shape)
