"""Random weights in every format, and activations of several kinds, for the kernel tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType

from moeserve.kernels.cpu_stream import CpuStream, Matrix
from moeserve.models.gguf.quant_types import QUANT_TYPES, UNQUANTISED

Type = GGMLQuantizationType

TYPES = sorted(QUANT_TYPES)
FLOATS = [t for t in TYPES if t in UNQUANTISED]
INTEGERS = [t for t in TYPES if t not in UNQUANTISED]

# Where a block has its float16 scale, and its float16 min where it has one.
SCALE_AT = {
    Type.Q4_0: 0,
    Type.Q4_1: 0,
    Type.Q5_0: 0,
    Type.Q5_1: 0,
    Type.Q8_0: 0,
    Type.Q2_K: 80,
    Type.Q3_K: 108,
    Type.Q4_K: 0,
    Type.Q5_K: 0,
    Type.Q6_K: 208,
    Type.IQ4_NL: 0,
    Type.IQ4_XS: 0,
}
MIN_AT = {Type.Q4_1: 2, Type.Q5_1: 2, Type.Q2_K: 82, Type.Q4_K: 2, Type.Q5_K: 2}
E8M0_AT = {Type.MXFP4: 0}  # a scale of 2^(byte - 128)
# For types that gguf-py cannot quantise: random codes with a min that centres the weights, as real ones are.
MEAN_CODE = {Type.Q2_K: 1.5, Type.Q4_K: 7.5, Type.Q5_K: 15.5}


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
        return self.type in INTEGERS

    def values(self) -> torch.Tensor:
        """Dequantised by gguf-py: float32, of `shape`."""
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
    return quants.dequantize(stored, kind).astype(np.float32)


def random_weights(kind: Type, *shape: int, seed: int = 0, centred: bool = False) -> Weights:
    """Gaussian weights quantised by gguf-py; where it cannot, random codes with plausible scales.

    `centred`: with mins that cancel the mean of their group's codes, as trained weights have them. Without it scales
    and mins are independent, which finds more mistakes.
    """
    rng = np.random.default_rng([seed, kind, *shape])
    values = rng.normal(0, 0.05, shape).astype(np.float32)
    try:
        rows = np.ascontiguousarray(quants.quantize(values, kind)).view(np.uint8)
    except NotImplementedError:
        rows = _random_codes(rng, kind, shape[:-1], shape[-1], centred)
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
    set_half(blocks, SCALE_AT[kind], scales)
    return blocks.reshape(*rows, -1)


def _equal_scales_and_mins(kind: Type, blocks: npt.NDArray[np.uint8]) -> None:
    if kind == Type.Q2_K:  # a nibble each
        nibbles = blocks[..., :16]
    else:  # Q4_K, Q5_K: six bits each; see csrc/formats.cpp
        blocks[..., 8:12] = blocks[..., 4:8]
        nibbles = blocks[..., 12:16]
    nibbles[...] = (nibbles & 15) * 0x11


def random_blocks(
    rng: np.random.Generator, kind: Type, rows: tuple[int, ...], cols: int
) -> npt.NDArray[np.uint8]:
    """uint8 [*rows, blocks, block bytes]."""
    block = QUANT_TYPES[kind]
    return rng.integers(0, 256, (*rows, cols // block.block_size, block.type_size), np.uint8)


def set_half(blocks: npt.NDArray[np.uint8], at: int, values: npt.NDArray[np.floating]) -> None:
    """Writes float16 `values` [..] at byte `at` of blocks [.., block bytes]."""
    blocks[..., at : at + 2] = values.astype(np.float16)[..., None].view(np.uint8)


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
