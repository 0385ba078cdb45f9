"""Random weights of a file's shapes and types, for benchmarks: the file's header is read, its tensors are not.

The file may end where its tensors begin. Matrices come from pools of random blocks, each chunk of a tensor from another
place of its type's pool; vectors (the norms) are ones. A matrix keeps the size of what it multiplies (weights of about
1 / sqrt(columns)); the router's is ROUTER times larger, as a trained one's, whose choices are clear.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import quants
from gguf.constants import GGMLQuantizationType as Type

from . import names as n
from .file import GGUFFile, open_gguf
from .header import TensorInfo
from .quant_types import QUANT_TYPES

ROUTER = 3.0
POOL_BLOCKS = 1 << 13
POOL_FLOATS = 1 << 20

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# Bytes of a block: its float16 scale, its float16 min, and the code that centres the weights with that min.
_SCALE_AT = {
    Type.Q4_0: 0, Type.Q4_1: 0, Type.Q5_0: 0, Type.Q5_1: 0, Type.Q8_0: 0, Type.Q2_K: 80, Type.Q3_K: 108,
    Type.Q4_K: 0, Type.Q5_K: 0, Type.Q6_K: 208, Type.IQ4_NL: 0, Type.IQ4_XS: 0,
}  # fmt: skip
_MIN_AT = {Type.Q4_1: 2, Type.Q5_1: 2, Type.Q2_K: 82, Type.Q4_K: 2, Type.Q5_K: 2}
_MEAN_CODE = {Type.Q4_1: -7.5, Type.Q5_1: -15.5, Type.Q2_K: 1.5, Type.Q4_K: 7.5, Type.Q5_K: 15.5}
_FLOATS: dict[Type, npt.DTypeLike] = {Type.F32: np.float32, Type.F16: np.float16}


def open_dummy(path: Path) -> DummyFile:
    """As `open_gguf`, but for the tensors' bytes. Raises GGUFError."""
    file = open_gguf(path, has_tensors=False)
    return DummyFile(file)


class DummyFile(GGUFFile):
    """Arrays that `data` returns are overwritten by its next call."""

    def __init__(self, file: GGUFFile) -> None:
        self.path, self.metadata, self.tensors = file.path, file.metadata, file.tensors
        self.file_bytes = sum(tensor.nbytes for tensor in file.tensors.values())
        self.is_mapped = False
        self._pools: dict[tuple[Type, float], Bytes] = {}
        self._scratch: Bytes = np.empty(0, np.uint8)

    def data(self, name: str) -> Bytes:
        tensor = self.tensors[name]
        if len(tensor.shape) == 1:
            return _as_bytes(np.ones(tensor.shape[0], np.float32), tensor.type)
        if len(self._scratch) < tensor.nbytes:
            self._scratch = np.empty(tensor.nbytes, np.uint8)
        pool = self._pool(tensor.type, std_of(tensor))
        block = QUANT_TYPES[tensor.type].type_size
        period = len(pool) // 2  # the pool is there twice
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        out = self._scratch[: tensor.nbytes]
        for start in range(0, len(out), period):
            size = min(period, len(out) - start)
            first = int(rng.integers(0, period // block)) * block
            out[start : start + size] = pool[first : first + size]
        return out

    def advise_done(self, name: str) -> None:
        """Nothing is mapped."""

    def _pool(self, kind: Type, std: float) -> Bytes:
        key = (kind, std)
        if key not in self._pools:
            pool = _random_pool(kind, std)
            self._pools[key] = np.concatenate([pool, pool])
        return self._pools[key]


def std_of(tensor: TensorInfo) -> float:
    """Of a matrix' weights."""
    scale = ROUTER if n.FFN_GATE_INP in tensor.name else 1.0
    return float(scale / np.sqrt(tensor.shape[-1]))


def _random_pool(kind: Type, std: float) -> Bytes:
    rng = np.random.default_rng(int(kind))
    if QUANT_TYPES[kind].block_size == 1:
        return _as_bytes(rng.normal(0, std, POOL_FLOATS).astype(np.float32), kind)
    blocks = rng.integers(0, 256, (POOL_BLOCKS, QUANT_TYPES[kind].type_size), np.uint8)
    _set_scales(blocks, kind, 1.0)
    found = float(quants.dequantize(blocks[:256], kind).std())
    _set_scales(blocks, kind, std / found)
    return blocks.reshape(-1)


def _set_scales(blocks: Bytes, kind: Type, scale: float) -> None:
    """All blocks' alike, which leaves their groups' scales different."""
    if kind == Type.MXFP4:
        blocks[:, 0] = 128 + round(np.log2(scale))  # a power of two
        return
    at = _SCALE_AT[kind]
    blocks[:, at : at + 2] = np.float16(scale).reshape(1).view(np.uint8)
    if kind in _MIN_AT:
        at = _MIN_AT[kind]
        blocks[:, at : at + 2] = np.float16(scale * _MEAN_CODE[kind]).reshape(1).view(np.uint8)


def _as_bytes(values: npt.NDArray[np.float32], kind: Type) -> Bytes:
    if kind == Type.BF16:
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(_FLOATS[kind]).view(np.uint8)
