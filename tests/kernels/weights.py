"""Random weights in every format, and activations of several kinds, for the kernel tests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType

from moeserve.kernels.cpu_stream import CpuStream, Matrix
from moeserve.quantization import QUANT_TYPES, StoredScales
from tests.support.models.ggml_types import ggml_type, ggml_values

Type = GGMLQuantizationType

TYPES = [ggml_type(number) for number in sorted(QUANT_TYPES)]
FLOATS = [t for t in TYPES if not QUANT_TYPES[t].is_quantised]
INTEGERS = [t for t in TYPES if QUANT_TYPES[t].is_quantised]
# Whose products the CPU engine computes from activations of 8 bits.
CPU_INTEGERS = [t for t in INTEGERS if (f := QUANT_TYPES[t].layout) is None or not f.e4m3]
GPU_TYPES = [t for t in TYPES if QUANT_TYPES[t].gpu]
GPU_INTEGERS = [t for t in INTEGERS if QUANT_TYPES[t].gpu]

# Where a block has its float16 scale, and its float16 min where it has one.
_LAYOUTS = {t: layout for t in INTEGERS if (layout := QUANT_TYPES[t].layout) is not None}
_BOOKS = {t: book for t in INTEGERS if (book := QUANT_TYPES[t].codebook) is not None}
SCALE_AT = {t: layout.halves_at for t, layout in _LAYOUTS.items() if layout.halves} | {
    t: 0 for t, book in _BOOKS.items() if book.has_d
}
# Their float16 scale is spread over the highest nibbles of four 16-bit words from here on.
SPREAD_SCALE_AT = {t: book.octets_at for t, book in _BOOKS.items() if not book.has_d}
MIN_AT = {t: layout.halves_at + 2 for t, layout in _LAYOUTS.items() if layout.halves == 2}
# A byte: a scale of 2^(byte - 128).
E8M0_AT = {t: layout.octets_at for t, layout in _LAYOUTS.items() if layout.stored_scales == StoredScales.E8M0}
# A float32, of a block or of all of a row.
FLOAT32_AT = {
    t: layout.octets_at
    for t, layout in _LAYOUTS.items()
    if layout.stored_scales in (StoredScales.F32, StoredScales.UE4M3_F32)
}
# For types that gguf-py cannot quantise: random codes with a min that centres the weights, as real ones are.
MEAN_CODE = {t: ((1 << _LAYOUTS[t].low_bits + _LAYOUTS[t].high_bits) - 1) / 2 for t in MIN_AT}


@dataclass(frozen=True)
class Weights:
    """One matrix [out, in] or a stack [E, out, in] of a type, as bytes of GGUF rows."""

    type: Type
    rows: npt.NDArray[np.uint8]  # [.., out, row bytes]
    cols: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.rows.shape[:-1], self.cols)

    @property
    def integer(self) -> bool:
        return self.type in CPU_INTEGERS

    def values(self) -> torch.Tensor:
        """Dequantised by gguf-py, or by hand: float32, of `shape`."""
        return torch.from_numpy(dequantize(self.type, self.rows).reshape(self.shape))

    def head(self, rows: int) -> Weights:
        return Weights(self.type, self.rows[:rows], self.cols)

    def pack(self, stream: CpuStream) -> Matrix:
        return stream.pack(np.ascontiguousarray(self.rows), int(self.type), self.shape)

    def view(self, stream: CpuStream) -> Matrix:
        """In place: computed from `rows`, which must outlive it."""
        assert self.rows.flags.c_contiguous
        return stream.view(self.rows, int(self.type), self.shape)


def dequantize(kind: Type, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    stored = rows.view({Type.F32: np.float32, Type.F16: np.float16}.get(kind, np.uint8))
    return ggml_values(kind, stored)


@lru_cache(maxsize=32)
def random_weights(kind: Type, *shape: int, seed: int = 0, centred: bool = False) -> Weights:
    """Gaussian weights quantised by gguf-py; where it cannot, random codes with plausible scales. The same arguments
    return the same read-only weights: each instruction set would quantise them again.

    `centred`: with mins that cancel the mean of their group's codes, as trained weights have them. Without it scales
    and mins are independent, which finds more mistakes.
    """
    rng = np.random.default_rng([seed, kind, *shape])
    values = rng.normal(0, 0.05, shape).astype(np.float32)
    try:
        rows = np.ascontiguousarray(quants.quantize(values, kind)).view(np.uint8)
    except (NotImplementedError, KeyError):  # what it does not know, it looks up in vain
        rows = _random_codes(rng, kind, shape[:-1], shape[-1], centred)
    rows.flags.writeable = False
    return Weights(kind, rows, shape[-1])


def _random_codes(
    rng: np.random.Generator, kind: Type, rows: tuple[int, ...], cols: int, centred: bool
) -> npt.NDArray[np.uint8]:
    blocks = random_blocks(rng, kind, rows, cols)
    scales = rng.uniform(0.5, 1.5, blocks.shape[:-1]) * 2.0**-12
    if kind in MIN_AT:
        set_half(blocks, MIN_AT[kind], scales * MEAN_CODE[kind])
        if centred:
            _equal_scales_and_mins(kind, blocks)
    else:
        scales *= rng.choice([-1, 1], scales.shape)
    if kind in SPREAD_SCALE_AT:
        set_spread_half(blocks, SPREAD_SCALE_AT[kind], scales)
    elif kind in SCALE_AT:
        set_half(blocks, SCALE_AT[kind], scales)
        if kind in _LAYOUTS and _LAYOUTS[kind].has_zero:
            _set_zeros(kind, blocks, scales)
    elif kind in FLOAT32_AT:
        set_floats(kind, blocks, scales)
    else:  # a byte a group: within two powers of two
        at, octets = _LAYOUTS[kind].octets_at, _LAYOUTS[kind].octets
        blocks[..., at : at + octets] = 24 + blocks[..., at : at + octets] % 16
    return blocks.reshape(*rows, -1)


def set_floats(kind: Type, blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.floating]) -> None:
    """Sets the float32 of each block. NVFP4's is the same for all of a row; bytes follow, within two powers of two."""
    layout = _LAYOUTS[kind]
    at, end = layout.octets_at, layout.octets_at + layout.octets
    if layout.stored_scales == StoredScales.UE4M3_F32:
        scales = np.broadcast_to(scales[..., :1], scales.shape)
        blocks[..., at + 4 : end] = 48 + blocks[..., at + 4 : end] % 16
    blocks[..., at : at + 4] = np.ascontiguousarray(scales.astype(np.float32))[..., None].view(np.uint8)


def _set_zeros(kind: Type, blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.floating]) -> None:
    """Near the middle of the codes, as real ones are; and scales of bfloat16, where they are."""
    layout = _LAYOUTS[kind]
    zeros = blocks[..., layout.octets_at]
    zeros[...] = (1 << layout.low_bits - 1) - 2 + zeros % 4
    if layout.stored_scales == StoredScales.BF16_ZERO:
        upper = np.ascontiguousarray(scales.astype(np.float32)).view(np.uint32) >> 16
        set_half(blocks, layout.halves_at, upper.astype(np.uint16).view(np.float16))


def _equal_scales_and_mins(kind: Type, blocks: npt.NDArray[np.uint8]) -> None:
    layout = _LAYOUTS[kind]
    at, end = layout.octets_at, layout.octets_at + layout.octets
    if layout.stored_scales == StoredScales.SIX_BIT_MIN:  # six bits each; see csrc/formats/formats.cpp
        blocks[..., at + 4 : at + 8] = blocks[..., at : at + 4]
        at += 8
    nibbles = blocks[..., at:end]
    nibbles[...] = (nibbles & 15) * 0x11


def random_blocks(
    rng: np.random.Generator, kind: Type, rows: tuple[int, ...], cols: int
) -> npt.NDArray[np.uint8]:
    """uint8 [*rows, blocks, block bytes]."""
    block = QUANT_TYPES[kind]
    return rng.integers(0, 256, (*rows, cols // block.block_columns, block.block_bytes), np.uint8)


def set_half(blocks: npt.NDArray[np.uint8], at: int, values: npt.NDArray[np.floating]) -> None:
    """Writes float16 `values` [..] at byte `at` of blocks [.., block bytes]."""
    blocks[..., at : at + 2] = values.astype(np.float16)[..., None].view(np.uint8)


def set_spread_half(blocks: npt.NDArray[np.uint8], at: int, values: npt.NDArray[np.floating]) -> None:
    """Writes float16 `values` [..] to the highest nibbles of the four 16-bit words at byte `at`, the lowest first."""
    bits = np.ascontiguousarray(values.astype(np.float16)).view(np.uint16)
    for word in range(4):
        high = blocks[..., at + 2 * word + 1]
        high[...] = high & 15 | (bits >> 4 * word & 15).astype(np.uint8) << 4


ACTIVATIONS = ("gaussian", "heavy-tailed", "outlier channels")


def activations(kind: str, n: int, cols: int, seed: int = 0) -> torch.Tensor:
    """float32 [n, cols], each row with a mean square of 1, as a norm leaves it.

    Heavy-tailed: Student's t with 2 degrees of freedom. Outlier channels: one column in 50 is 40 times as large in
    every token, as in trained transformers (Dettmers et al. 2022, https://arxiv.org/abs/2208.07339).
    """
    rng = np.random.default_rng([seed, n, cols])
    if kind == "heavy-tailed":
        x = rng.standard_t(2, (n, cols))
    else:
        x = rng.normal(0, 1, (n, cols))
    if kind == "outlier channels":
        x *= np.where(np.random.default_rng(cols).random(cols) < 0.02, 40.0, 1.0)
    x /= np.sqrt(np.square(x).mean(axis=1, keepdims=True))
    return torch.from_numpy(x.astype(np.float32))


def nmse(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Error power over signal power."""
    error = (got.double() - expected.double()).square().mean()
    return (error / expected.double().square().mean()).item()
