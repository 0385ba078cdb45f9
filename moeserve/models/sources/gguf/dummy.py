"""Random weights with a file's shapes and types, for benchmarks: only the file's header is read.

The file may be truncated after the header. Matrices are taken from pools of random blocks, each chunk of a tensor from
a different place in its type's pool; vectors (norms) are ones. Matrices preserve the magnitude of their input (weights
of about 1 / sqrt(columns)). The router's weights are ROUTER times larger, because a trained router's choices are clear.
The rates of recurrent states are -1: with positive rates states would grow without end.
"""

from __future__ import annotations

import zlib
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeserve.models.sources.regular_file import FileVersion
from moeserve.models.sources.row_places import RowPart, RowPlaces
from moeserve.quantization import QuantType, StoredScales
from moeserve.quantization.codebook import Codebook
from moeserve.quantization.quant_type import FLOAT32_BYTES
from moeserve.quantization.reference import dequantize

from . import names as n
from .file import GGUFFile, open_gguf
from .header import TensorInfo

ROUTER = 3.0
POOL_BLOCKS = 1 << 13
POOL_FLOATS = 1 << 20

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def open_dummy(path: Path) -> DummyFile:
    """Opens a GGUF file without its tensors' bytes, for random weights. Raises GGUFError if it is no GGUF file."""
    file = open_gguf(path, has_tensors=False)
    return DummyFile(file)


class DummyFile(GGUFFile):
    """A file with random weights. The next call of `data` overwrites the array that the last one returned."""

    def __init__(self, file: GGUFFile) -> None:
        self.path, self.metadata, self.tensors = file.path, file.metadata, file.tensors
        self.file_bytes = sum(tensor.nbytes for tensor in file.tensors.values())
        self.is_mapped = False
        self._pools: dict[tuple[QuantType, float], Bytes] = {}
        self._scratch: Bytes = np.empty(0, np.uint8)

    def data(self, name: str) -> Bytes:
        tensor = self.tensors[name]
        if name.endswith(f".{n.SSM_A}"):
            return _as_bytes(np.full(prod(tensor.shape), -1.0, np.float32), tensor.type)
        if len(tensor.shape) == 1:
            return _as_bytes(np.ones(tensor.shape[0], np.float32), tensor.type)
        if len(self._scratch) < tensor.nbytes:
            self._scratch = np.empty(tensor.nbytes, np.uint8)
        pool = self._pool(tensor.type, std_of(tensor))
        block = tensor.type.block_bytes
        period = len(pool) // 2  # the pool is stored twice in a row
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        out = self._scratch[: tensor.nbytes]
        for start in range(0, len(out), period):
            size = min(period, len(out) - start)
            first = int(rng.integers(0, period // block)) * block
            out[start : start + size] = pool[first : first + size]
        return out

    def rows(self, name: str, rows: np.ndarray[Any, np.dtype[np.int64]]) -> Bytes:
        """Returns random rows of the tensor, uint8 [n, bytes of a row]. rows: int64 [n]; a row is the same at each
        call."""
        tensor = self.tensors[name]
        pool = self._pool(tensor.type, std_of(tensor))
        row_bytes = tensor.nbytes // tensor.shape[0]
        block = tensor.type.block_bytes
        first = rows * 1_000_003 % (len(pool) // 2 // block) * block
        return np.take(pool, (first[:, None] + np.arange(row_bytes)) % len(pool))

    def row_places(self, name: str) -> RowPlaces:
        """Returns where `rows` takes its random rows from."""
        tensor = self.tensors[name]
        pool, block = self._pool(tensor.type, std_of(tensor)), tensor.type.block_bytes
        part = RowPart(pool.ctypes.data, tensor.shape[0], block, 1_000_003, len(pool) // 2 // block)
        return RowPlaces((part,), (pool,))

    def files_of(self, name: str) -> dict[Path, FileVersion]:
        """Returns no file: the weights are random."""
        return {}

    def experts_in_file(self, name: str) -> None:
        """Returns None: no file has these weights."""

    def advise_done(self, name: str) -> None:
        """Does nothing: no file is mapped."""

    def drop_cached(self, name: str) -> None:
        """Does nothing: no file is read."""

    def _pool(self, kind: QuantType, std: float) -> Bytes:
        key = (kind, std)
        if key not in self._pools:
            pool = _random_pool(kind, std)
            self._pools[key] = np.concatenate([pool, pool])
        return self._pools[key]


def std_of(tensor: TensorInfo) -> float:
    """Returns the standard deviation of the random weights of a matrix: 1 / sqrt(columns), which keeps activations near
    1; times ROUTER for a router."""
    scale = ROUTER if n.FFN_GATE_INP in tensor.name else 1.0
    return float(scale / np.sqrt(tensor.shape[-1]))


def _random_pool(kind: QuantType, std: float) -> Bytes:
    rng = np.random.default_rng(int(kind))
    if not kind.is_quantised:
        return _as_bytes(rng.normal(0, std, POOL_FLOATS).astype(np.float32), kind)
    blocks = rng.integers(0, 256, (POOL_BLOCKS, kind.block_bytes), np.uint8)
    _set_scales(blocks, kind, 1.0)
    found = float(dequantize(kind, blocks[:256]).std())
    _set_scales(blocks, kind, std / found)
    return blocks.reshape(-1)


def _set_scales(blocks: Bytes, kind: QuantType, scale: float) -> None:
    """Sets equal scales in all blocks, with a min that centres the weights. The scales of groups within a block still
    differ."""
    if kind.codebook is not None:
        _set_book_scale(blocks, kind.codebook, scale)
        return
    layout = kind.layout
    assert layout is not None
    if layout.stored_scales == StoredScales.E8M0:
        blocks[:, layout.octets_at] = 128 + round(np.log2(scale))  # a power of two
        return
    if (
        layout.stored_scales == StoredScales.UE4M3
    ):  # powers of two: the lowest one that can be stored, if it is below that
        blocks[:, layout.octets_at : layout.octets_at + layout.octets] = (
            max(8 + round(np.log2(scale)), 1) << 3
        )
        return
    at = layout.octets_at
    if layout.stored_scales in (StoredScales.F32, StoredScales.UE4M3_F32):
        blocks[:, at : at + FLOAT32_BYTES] = np.array([scale], np.float32).view(np.uint8)
        if layout.stored_scales == StoredScales.UE4M3_F32:
            blocks[:, at + FLOAT32_BYTES : at + layout.octets] &= 63  # below 2, and never NaN
        return
    halves = [scale]
    if layout.has_own_min:
        mean_code = ((1 << layout.low_bits + layout.high_bits) - 1) / 2
        sign = -1 if layout.stored_scales == StoredScales.F16_MIN else 1  # F16_MIN stores -m
        halves.append(sign * scale * mean_code)
    at = layout.halves_at
    blocks[:, at : at + 2 * len(halves)] = np.array(halves, np.float16).view(np.uint8)


def _set_book_scale(blocks: Bytes, book: Codebook, scale: float) -> None:
    half = np.array([scale], np.float16)
    if book.has_d:
        blocks[:, :2] = half.view(np.uint8)
        return
    bits = int(half.view(np.uint16)[0])
    for word in range(4):
        high = blocks[:, book.octets_at + 2 * word + 1]
        high[...] = high & 15 | (bits >> 4 * word & 15) << 4


def _as_bytes(values: npt.NDArray[np.float32], kind: QuantType) -> Bytes:
    if kind.float_name == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(kind.float_name).view(np.uint8)
