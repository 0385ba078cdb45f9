"""GGUF's types as gguf-py knows them, and by hand those that its installed version lacks, and our own."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from moeserve.quantization.table import FP8_TYPES, NVFP4_TYPES, ZERO_TYPES

# Name, number, and columns and bytes of a block, as in ggml's headers: what gguf-py may not know yet.
NEWEST = {41: ("Q1_0", (128, 18)), 42: ("Q2_0", (64, 18))}
OURS = {int(row): row for rows in (ZERO_TYPES, FP8_TYPES, NVFP4_TYPES) for row in rows.values()}


def ggml_type(number: int) -> GGMLQuantizationType:
    """gguf-py's member of this number, or one like it."""
    if number not in NEWEST and number not in OURS:
        return GGMLQuantizationType(number)
    member = int.__new__(GGMLQuantizationType, number)
    member._name_ = OURS[number].name if number in OURS else NEWEST[number][0]
    member._value_ = number
    return member


def ggml_sizes(number: int) -> tuple[int, int]:
    """Columns and bytes of a block."""
    return NEWEST[number][1] if number in NEWEST else GGML_QUANT_SIZES[GGMLQuantizationType(number)]


def ggml_values(number: int, blocks: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    """uint8 rows of whole blocks [.., bytes], or floats of the type's own, dequantised: float32 [.., columns]."""
    if number in OURS:
        row = OURS[number]
        parts = blocks.view(np.uint8).reshape(-1, row.block_bytes)
        values = (
            _fp8(parts) if row.name.startswith("FP8") else
            _nvfp4(parts, row.block_columns) if row.name.startswith("NVFP4") else
            _with_zeros(row.name, parts)
        )  # fmt: skip
        return values.astype(np.float32).reshape(*blocks.shape[:-1], -1)
    if number not in NEWEST:
        return quants.dequantize(blocks, GGMLQuantizationType(number)).astype(np.float32)
    _, (columns, nbytes) = NEWEST[number]
    parts = blocks.view(np.uint8).reshape(-1, nbytes)
    d = np.ascontiguousarray(parts[:, :2]).view(np.float16).astype(np.float32)
    bits = np.unpackbits(parts[:, 2:], axis=1, bitorder="little").astype(np.float32)
    numbers = 2 * bits - 1 if columns == 128 else bits[:, ::2] + 2 * bits[:, 1::2] - 1
    return (d * numbers).astype(np.float32).reshape(*blocks.shape[:-1], -1)


def _e4m3(octets: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """A sign, four bits of exponent and three of fraction. The codes that are no numbers count as 480, which their bits
    would mean."""
    codes = octets.astype(np.int32)
    exponents, fractions = codes >> 3 & 15, codes & 7
    magnitudes: npt.NDArray[np.float64] = np.ldexp(
        np.where(exponents, 8 + fractions, fractions), np.maximum(exponents, 1) - 10
    )
    return np.where(codes < 128, magnitudes, -magnitudes).astype(np.float32)


def _fp8(parts: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """[blocks, 4 + columns]: a float32, then a byte a column."""
    return np.ascontiguousarray(parts[:, :4]).view(np.float32) * _e4m3(parts[:, 4:])


def _nvfp4(parts: npt.NDArray[np.uint8], columns: int) -> npt.NDArray[np.float32]:
    """[blocks, 4 + columns / 16 + columns / 2]: a float32, a scale for each 16 columns, then two codes a byte."""
    own = np.ascontiguousarray(parts[:, :4]).view(np.float32)
    octets, codes = parts[:, 4 : 4 + columns // 16], parts[:, 4 + columns // 16 :]
    magnitudes: npt.NDArray[np.uint8] = octets & np.uint8(127)
    scales = np.where(octets == 127, np.float32(0), _e4m3(magnitudes)) * own  # ggml's reading of 127
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    numbers = np.concatenate([levels, -levels])[np.stack([codes & 15, codes >> 4], axis=-1)]
    values: npt.NDArray[np.float32] = scales[..., None] * numbers.reshape(len(parts), -1, 16)
    return values


def _with_zeros(name: str, parts: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """By the type's name: a scale of 16 bits, a zero point, then codes; those of 8 bits are less 128."""
    bits = np.ascontiguousarray(parts[:, :2]).view(np.uint16)
    if name.endswith("BF16"):
        scales = (bits.astype(np.uint32) << 16).view(np.float32)
    else:
        scales = bits.view(np.float16).astype(np.float32)
    zeros, codes = parts[:, 2:3].astype(np.float32), parts[:, 3:]
    if name.startswith("INT8"):
        numbers = codes.view(np.int8).astype(np.float32) + 128
    elif name.startswith("INT4"):
        numbers = np.stack([codes % 16, codes // 16], axis=-1).reshape(len(parts), -1).astype(np.float32)
    else:  # two bits of each column, of INT3 then the third of each
        low = codes if name.startswith("INT2") else codes[:, : codes.shape[1] * 2 // 3]
        numbers = np.stack([low >> 2 * i & 3 for i in range(4)], axis=-1).reshape(len(parts), -1)
        if name.startswith("INT3"):
            numbers = numbers + 4 * np.unpackbits(codes[:, low.shape[1] :], axis=1, bitorder="little")
        numbers = numbers.astype(np.float32)
    return scales * (numbers - zeros)
